# The Python module, if this Python is the one that torch was built for.

find_library(SHARDSTEP_TORCH_PYTHON_LIBRARY torch_python
  PATHS ${SHARDSTEP_TORCH_PREFIX}/lib NO_DEFAULT_PATH)
set(missing)
if(NOT Python_Development.Module_FOUND)
  set(missing "Python's development files")
elseif(NOT SHARDSTEP_TORCH_PYTHON_LIBRARY)
  set(missing "libtorch_python in ${SHARDSTEP_TORCH_PREFIX}/lib")
elseif(NOT EXISTS ${SHARDSTEP_TORCH_PREFIX}/_C.${Python_SOABI}.so)
  set(missing "a torch for ${Python_SOABI} in ${SHARDSTEP_TORCH_PREFIX}")
endif()

set(can_build_python ${PROJECT_IS_TOP_LEVEL})
if(missing OR SHARDSTEP_SANITIZE)
  set(can_build_python OFF)
endif()
option(SHARDSTEP_BUILD_PYTHON "Build the Python module" ${can_build_python})
if(SHARDSTEP_BUILD_PYTHON)
  if(missing)
    message(FATAL_ERROR "shardstep: the Python module needs ${missing}")
  endif()
  add_subdirectory(python)
endif()

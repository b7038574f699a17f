# Finds libtorch by its files: headers, libraries, version, C++ ABI. CMake's own Torch package asks
# the CUDA builds of torch for the CUDA toolkit, which nothing here needs. Installed with shardstep,
# for the projects that use it.
#
# Looks under CMAKE_PREFIX_PATH, then in the hints, then where Python finds torch. pip's build
# isolation hides the environment's packages by PYTHONPATH, so Python is asked with and without it.
# torch itself is not a build requirement: pip would bring another one than the one installed.
#
#   shardstep_find_torch(hint...)
# sets SHARDSTEP_TORCH_PREFIX and SHARDSTEP_TORCH_VERSION, and defines shardstep::libtorch.

function(shardstep_torch_of_python result)
  set(${result} "" PARENT_SCOPE)
  foreach(flags "" -E)
    if(NOT Python_EXECUTABLE)
      return()
    endif()
    execute_process(
      COMMAND ${Python_EXECUTABLE} ${flags} -c
        "import importlib.util as u; print(*u.find_spec('torch').submodule_search_locations)"
      WORKING_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}
      OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(folder)
      set(${result} ${folder} PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

function(shardstep_torch_version result config_dir)
  include(${config_dir}/TorchConfigVersion.cmake)
  set(${result} ${PACKAGE_VERSION} PARENT_SCOPE)
endfunction()

function(shardstep_find_torch)
  set(suffix share/cmake/Torch)
  find_path(SHARDSTEP_TORCH_CONFIG_DIR TorchConfigVersion.cmake
    HINTS ${Torch_DIR} ${TORCH_INSTALL_PREFIX} ${ARGN} PATH_SUFFIXES ${suffix})
  if(NOT SHARDSTEP_TORCH_CONFIG_DIR)
    shardstep_torch_of_python(folder)
    find_path(SHARDSTEP_TORCH_CONFIG_DIR TorchConfigVersion.cmake
      HINTS ${folder} PATH_SUFFIXES ${suffix})
  endif()
  if(NOT SHARDSTEP_TORCH_CONFIG_DIR)
    message(FATAL_ERROR "shardstep: expected torch for ${Python_EXECUTABLE}, got none: install it "
      "(pip install torch) and run this again. A tool that builds in a virtual environment of its "
      "own (uv, build) needs --no-build-isolation; CMake alone takes CMAKE_PREFIX_PATH.")
  endif()
  cmake_path(SET prefix NORMALIZE "${SHARDSTEP_TORCH_CONFIG_DIR}/../../..")
  shardstep_torch_version(version ${SHARDSTEP_TORCH_CONFIG_DIR})
  set(SHARDSTEP_TORCH_PREFIX ${prefix} PARENT_SCOPE)
  set(SHARDSTEP_TORCH_VERSION ${version} PARENT_SCOPE)

  add_library(shardstep::libtorch INTERFACE IMPORTED GLOBAL)
  # An imported target's headers are the system's: they are not ours to keep free of warnings.
  target_include_directories(shardstep::libtorch INTERFACE
    ${prefix}/include ${prefix}/include/torch/csrc/api/include)
  target_compile_definitions(shardstep::libtorch INTERFACE USE_DISTRIBUTED)
  file(STRINGS ${SHARDSTEP_TORCH_CONFIG_DIR}/TorchConfig.cmake abi REGEX "_GLIBCXX_USE_CXX11_ABI=0")
  if(abi)
    target_compile_definitions(shardstep::libtorch INTERFACE _GLIBCXX_USE_CXX11_ABI=0)
  endif()
  # libtorch.so brings in the devices that this build has; nothing refers to it by a symbol.
  target_link_libraries(shardstep::libtorch INTERFACE
    -Wl,--push-state,--no-as-needed ${prefix}/lib/libtorch.so -Wl,--pop-state
    ${prefix}/lib/libtorch_cpu.so ${prefix}/lib/libc10.so)
endfunction()

# Finds Torch: under CMAKE_PREFIX_PATH, else where Python finds it. pip's build isolation hides the
# environment's packages by PYTHONPATH, so Python is asked with and without it. Torch itself is not
# a build requirement: pip would bring another one than the one that is installed.

find_package(Python QUIET COMPONENTS Interpreter OPTIONAL_COMPONENTS Development.Module)
set(torch_hint)
foreach(flags "" -E)
  if(NOT Python_EXECUTABLE OR torch_hint)
    break()
  endif()
  execute_process(
    COMMAND ${Python_EXECUTABLE} ${flags} -c
      "import importlib.util as u; print(*u.find_spec('torch').submodule_search_locations)"
    WORKING_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}
    OUTPUT_VARIABLE torch_hint OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endforeach()

find_package(Torch QUIET HINTS ${torch_hint})
if(NOT Torch_FOUND)
  message(FATAL_ERROR "shardstep: expected torch for ${Python_EXECUTABLE}, got none: install it "
    "(pip install torch) and run this again. A tool that builds in a virtual environment of its "
    "own (uv, build) needs --no-build-isolation; CMake alone takes CMAKE_PREFIX_PATH.")
endif()

# nlohmann_json, which only src/ includes: the system's, else the headers in PyPI's package of that
# name.

find_package(nlohmann_json 3.9 QUIET)
if(NOT nlohmann_json_FOUND)
  if(Python_EXECUTABLE)
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c
        "import importlib.util as u; print(*u.find_spec('nlohmann_json').submodule_search_locations)"
      OUTPUT_VARIABLE json_package OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  find_path(SHARDSTEP_JSON_INCLUDE_DIR nlohmann/json.hpp HINTS ${json_package}/include)
  if(NOT SHARDSTEP_JSON_INCLUDE_DIR)
    message(FATAL_ERROR "shardstep: expected the headers of nlohmann_json, got none: install them "
      "(Debian: nlohmann-json3-dev; or pip install nlohmann_json) and run this again.")
  endif()
  add_library(nlohmann_json::nlohmann_json INTERFACE IMPORTED)
  target_include_directories(nlohmann_json::nlohmann_json INTERFACE ${SHARDSTEP_JSON_INCLUDE_DIR})
endif()

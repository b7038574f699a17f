# nlohmann_json, which src/ alone includes: the system's, or a download.

find_package(nlohmann_json 3.9 QUIET)
if(NOT nlohmann_json_FOUND)
  include(FetchContent)
  FetchContent_Declare(nlohmann_json
    URL https://github.com/nlohmann/json/releases/download/v3.11.3/json.tar.xz
    DOWNLOAD_EXTRACT_TIMESTAMP OFF)
  set(JSON_BuildTests OFF)
  set(JSON_Install OFF)
  FetchContent_MakeAvailable(nlohmann_json)
endif()

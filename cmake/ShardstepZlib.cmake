# zlib, which src/ alone includes, for its CRC-32: the system's, or a download that is linked in.

find_package(ZLIB QUIET)
if(NOT ZLIB_FOUND)
  include(FetchContent)
  FetchContent_Declare(zlib
    URL https://github.com/madler/zlib/releases/download/v1.3.1/zlib-1.3.1.tar.gz
    DOWNLOAD_EXTRACT_TIMESTAMP OFF)
  set(ZLIB_BUILD_EXAMPLES OFF)
  set(SKIP_INSTALL_ALL ON)
  FetchContent_MakeAvailable(zlib)
  set_target_properties(zlibstatic PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_include_directories(zlibstatic PUBLIC
    "$<BUILD_INTERFACE:${zlib_SOURCE_DIR};${zlib_BINARY_DIR}>")
  add_library(ZLIB::ZLIB ALIAS zlibstatic)
endif()

# zlib, which only src/ includes, for its CRC-32. Every Linux has the library; where only the headers
# were unpacked, the link beside them is broken, so the library is found by its own name.

find_path(SHARDSTEP_ZLIB_INCLUDE_DIR zlib.h)
find_library(SHARDSTEP_ZLIB_LIBRARY NAMES libz.so libz.so.1)
if(NOT SHARDSTEP_ZLIB_INCLUDE_DIR OR NOT SHARDSTEP_ZLIB_LIBRARY)
  message(FATAL_ERROR "shardstep: expected zlib and its headers, got none: install them (Debian: "
    "zlib1g-dev) and run this again.")
endif()
add_library(shardstep_zlib INTERFACE IMPORTED)
target_include_directories(shardstep_zlib INTERFACE ${SHARDSTEP_ZLIB_INCLUDE_DIR})
target_link_libraries(shardstep_zlib INTERFACE ${SHARDSTEP_ZLIB_LIBRARY})

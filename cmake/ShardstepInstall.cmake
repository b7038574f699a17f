# For find_package(shardstep): library, headers, exported target, version. A wheel contains the
# component shardstep without its link.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/shardstep)
install(TARGETS shardstep EXPORT shardstepTargets
  LIBRARY COMPONENT shardstep NAMELINK_COMPONENT shardstep_link)
install(DIRECTORY include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT shardstep
  FILES_MATCHING PATTERN "*.h")
install(EXPORT shardstepTargets NAMESPACE shardstep:: DESTINATION ${package_dir}
  COMPONENT shardstep)
configure_package_config_file(cmake/shardstepConfig.cmake.in shardstepConfig.cmake
  INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO)
# Before 1.0, a new minor version may change the API.
write_basic_package_version_file(shardstepConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  cmake/ShardstepTorch.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/shardstepConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/shardstepConfigVersion.cmake
  DESTINATION ${package_dir} COMPONENT shardstep)

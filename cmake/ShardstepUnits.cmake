# Compiles sources together, as one translation unit, because libtorch's headers cost more than our
# code. Sources are named by a path below an include folder of the target, as an #include would:
# unlike CMake's UNITY_BUILD the unit names no absolute path, so ccache finds it in every clone.
#   shardstep_unit(target unit_name folder source...)
function(shardstep_unit target unit folder)
  set(text)
  foreach(source IN LISTS ARGN)
    string(APPEND text "#include \"${source}\"\n")
    list(APPEND sources ${folder}/${source})
  endforeach()
  set(file ${CMAKE_CURRENT_BINARY_DIR}/units/${target}_${unit}.cpp)
  file(CONFIGURE OUTPUT ${file} CONTENT "${text}" @ONLY)
  target_sources(${target} PRIVATE ${file} ${sources})
  # For editors to list; the unit compiles them.
  set_source_files_properties(${sources} PROPERTIES HEADER_FILE_ONLY ON)
endfunction()

# The sources of one folder of src/. Only comm/ loops over elements itself; the rest calls ATen, and
# compiles a third faster with -O1.
function(shardstep_layer name)
  list(TRANSFORM ARGN PREPEND ${name}/)
  shardstep_unit(shardstep ${name} ${PROJECT_SOURCE_DIR}/src ${ARGN})
  if(NOT name STREQUAL comm)
    set_source_files_properties(${CMAKE_CURRENT_BINARY_DIR}/units/shardstep_${name}.cpp PROPERTIES
      COMPILE_OPTIONS "$<$<CONFIG:Release>:-O1>")
  endif()
endfunction()

# Adds the sources of one folder of src/ to the library, as one translation unit.
function(shardstep_layer name)
  list(TRANSFORM ARGN PREPEND src/${name}/)
  target_sources(shardstep PRIVATE ${ARGN})
  set_source_files_properties(${ARGN} PROPERTIES UNITY_GROUP ${name})
endfunction()

# Sets SHARDSTEP_NCCL_SOURCE: the NCCL backend where this libtorch has one and the headers that c10d
# includes for it are found, in the nvidia wheels that come with torch or in a CUDA toolkit; else
# the file that refuses it. Says which in one line.

set(SHARDSTEP_NCCL_SOURCE process_group_no_nccl.cpp)
set(SHARDSTEP_NCCL_INCLUDE_DIRS)
set(torch_cuda ${SHARDSTEP_TORCH_PREFIX}/lib/libtorch_cuda.so)

function(shardstep_find_nccl_headers missing)
  file(GLOB wheels ${SHARDSTEP_TORCH_PREFIX}/../nvidia/*/include)
  foreach(header nccl.h cuda_runtime_api.h crt/host_defines.h cublas_v2.h cublasLt.h cusparse.h
                 cusolverDn.h)
    string(MAKE_C_IDENTIFIER SHARDSTEP_DIR_OF_${header} dir)
    find_path(${dir} ${header}
      HINTS ENV NCCL_INCLUDE_DIR ${wheels} PATHS ENV CUDA_HOME /usr/local/cuda
      PATH_SUFFIXES include)
    mark_as_advanced(${dir})
    if(NOT ${dir})
      set(${missing} ${header} PARENT_SCOPE)
      return()
    endif()
    list(APPEND dirs ${${dir}})
  endforeach()
  list(REMOVE_DUPLICATES dirs)
  set(SHARDSTEP_NCCL_INCLUDE_DIRS ${dirs} PARENT_SCOPE)
endfunction()

if(NOT EXISTS ${torch_cuda})
  message(STATUS "shardstep: without NCCL (this libtorch has no CUDA)")
else()
  # libtorch may have CUDA and no NCCL: ask its symbols.
  execute_process(COMMAND grep -q ProcessGroupNCCL ${torch_cuda} RESULT_VARIABLE without_nccl)
  set(missing_header)
  shardstep_find_nccl_headers(missing_header)
  if(without_nccl)
    message(STATUS "shardstep: without NCCL (this libtorch was built without it)")
  elseif(missing_header)
    message(STATUS "shardstep: without NCCL (${missing_header} not found; pip install "
      "nvidia-cuda-crt, or set CUDA_HOME, NCCL_INCLUDE_DIR)")
  else()
    message(STATUS "shardstep: with NCCL")
    set(SHARDSTEP_NCCL_SOURCE process_group_nccl.cpp)
  endif()
endif()

# Only the layer with that file sees CUDA's headers.
function(shardstep_use_nccl target)
  if(SHARDSTEP_NCCL_SOURCE STREQUAL process_group_nccl.cpp)
    list(TRANSFORM SHARDSTEP_NCCL_INCLUDE_DIRS PREPEND -isystem OUTPUT_VARIABLE includes)
    set_property(SOURCE ${CMAKE_CURRENT_BINARY_DIR}/units/${target}_launch.cpp APPEND PROPERTY
      COMPILE_OPTIONS -DUSE_C10D_NCCL ${includes})
    target_link_libraries(${target} PRIVATE
      ${torch_cuda} ${SHARDSTEP_TORCH_PREFIX}/lib/libc10_cuda.so)
  endif()
endfunction()

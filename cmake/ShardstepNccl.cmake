# Sets SHARDSTEP_NCCL_SOURCE: the NCCL backend where this libtorch and the machine have what it
# needs to compile, else the file that refuses it.

set(SHARDSTEP_NCCL_SOURCE process_group_no_nccl.cpp)
set(SHARDSTEP_HAS_NCCL OFF)
if(TARGET torch_cuda)
  find_path(SHARDSTEP_NCCL_INCLUDE_DIR nccl.h
    HINTS ENV NCCL_INCLUDE_DIR ${CUDA_TOOLKIT_ROOT_DIR}/include
          ${TORCH_INSTALL_PREFIX}/../nvidia/nccl/include)
  # A libtorch with CUDA may still have been built without NCCL: ask its symbols.
  find_library(SHARDSTEP_TORCH_CUDA_LIBRARY torch_cuda PATHS ${TORCH_INSTALL_PREFIX}/lib)
  execute_process(COMMAND grep -q ProcessGroupNCCL ${SHARDSTEP_TORCH_CUDA_LIBRARY}
    RESULT_VARIABLE without_nccl)
  if(without_nccl)
    message(STATUS "shardstep: this libtorch has no NCCL, building without it")
  elseif(SHARDSTEP_NCCL_INCLUDE_DIR)
    set(SHARDSTEP_NCCL_SOURCE process_group_nccl.cpp)
    set(SHARDSTEP_HAS_NCCL ON)
  else()
    message(STATUS "shardstep: nccl.h not found, building without NCCL (set NCCL_INCLUDE_DIR)")
  endif()
endif()

function(shardstep_use_nccl target)
  if(SHARDSTEP_HAS_NCCL)
    target_include_directories(${target} SYSTEM PRIVATE ${SHARDSTEP_NCCL_INCLUDE_DIR})
    target_compile_definitions(${target} PRIVATE USE_C10D_NCCL)
    target_link_libraries(${target} PRIVATE torch_cuda)
  endif()
endfunction()

# libtorch is not instrumented. So vptr checks, which need the type information of both sides, are
# left out; tests/cpp/CMakeLists.txt sets the run-time options for the rest.
function(shardstep_sanitize target)
  set(flags -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all
      -fno-omit-frame-pointer)
  target_compile_options(${target} PUBLIC "$<BUILD_INTERFACE:${flags}>")
  target_link_options(${target} PUBLIC "$<BUILD_INTERFACE:${flags}>")
endfunction()

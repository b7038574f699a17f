# `kind` is "address" (with the undefined-behaviour sanitizer) or "thread". libtorch is not
# instrumented. So vptr checks, which need the type information of both sides, are left out;
# tools/run_tests.py sets the run-time options.
function(shardstep_sanitize target kind)
  if(kind STREQUAL "thread")
    set(flags -fsanitize=thread -fno-omit-frame-pointer)
    # g++ warns that it does not follow fences; copy_past_caches has one, for its own stores.
    target_compile_options(${target} PUBLIC "$<BUILD_INTERFACE:-Wno-tsan>")
  else()
    set(flags -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all
        -fno-omit-frame-pointer)
  endif()
  target_compile_options(${target} PUBLIC "$<BUILD_INTERFACE:${flags}>")
  target_link_options(${target} PUBLIC "$<BUILD_INTERFACE:${flags}>")
endfunction()

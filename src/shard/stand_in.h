#pragma once

// The `.grad` in stage 2 once a gradient is divided among the ranks: a tensor of the parameter's
// shape without memory. Code that does not know about it gets an error that says what to call,
// rather than no gradient at all. Python sets its own stand-in, which answers.

#include <ATen/ATen.h>

namespace shardstep {

at::Tensor make_stand_in(const at::Tensor& param, int64_t index);

}  // namespace shardstep

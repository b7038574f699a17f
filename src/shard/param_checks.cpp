#include "shard/param_checks.h"

#include <algorithm>
#include <cmath>

#include "launch/who.h"
#include "shard/bucket.h"
#include "torch_versions.h"

namespace shardstep::detail {
namespace {

// Two tensors over the same memory would be updated twice and torn apart by flat storage.
void check_no_overlap(const std::vector<at::Tensor>& params) {
  struct Extent {
    const char* begin;
    const char* end;
    size_t index;
  };
  std::vector<Extent> extents;
  for (size_t i = 0; i < params.size(); ++i) {
    const auto* begin = static_cast<const char*>(params[i].const_data_ptr());
    if (params[i].numel() > 0) extents.push_back({begin, begin + params[i].nbytes(), i});
  }
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < extents.size(); ++i) {
    TORCH_CHECK_VALUE(!params[extents[i - 1].index].is_same(params[extents[i].index]),
                      "shardstep: expected every parameter once, got one as parameters ",
                      extents[i - 1].index, " and ", extents[i].index);
    TORCH_CHECK_VALUE(extents[i - 1].end <= extents[i].begin || extents[i].begin == nullptr,
                      "shardstep: expected parameters with memory of their own, got parameters ",
                      extents[i - 1].index, " and ", extents[i].index,
                      " that share some; to tie weights, use one tensor in both places");
  }
}

void check_one_dtype(const std::vector<at::Tensor>& params) {
  for (const auto& param : params) {
    TORCH_CHECK_VALUE(
        param.scalar_type() == params.front().scalar_type(),
        "shardstep: expected parameters of one dtype when sharding by parameter, got ",
        params.front().scalar_type(), " and ", param.scalar_type(),
        "; sharding by element takes any mix");
  }
}

// One exchange moves all parameters, and the local optimizer's kernels run where they are.
void check_devices(const std::vector<at::Tensor>& params, const ProcessGroupPtr& group) {
  const auto type = params.front().device().type();
  for (size_t i = 0; i < params.size(); ++i) {
    TORCH_CHECK_VALUE(params[i].device().type() == type,
                      "shardstep: expected parameters on devices of one type, got parameter 0 on ",
                      params.front().device(), " and parameter ", i, " on ", params[i].device(),
                      "; move the model to one type of device, or use an optimizer for each type");
  }
  if (group->getSize() == 1) return;
  std::string known;
  for (const auto& device : group->getDeviceTypes()) {
    known += (known.empty() ? "" : ", ") + c10::str(device.type());
  }
  TORCH_CHECK_VALUE(
      has_backend_for(*group, type),
      "shardstep: expected a process group with a backend for the parameters' device, ", type,
      ", got one for ", known);
}

void check_rounding(const std::vector<at::Tensor>& params, const ProcessGroupPtr& group) {
  bool any = false;
  for (size_t i = 0; i < params.size(); ++i) {
    const auto dtype = params[i].scalar_type();
    any = any || dtype == at::kBFloat16;
    TORCH_CHECK_VALUE(dtype != at::kHalf,
                      "shardstep: expected bfloat16 parameters with stochastic rounding, got "
                      "parameter ",
                      i, " of ", dtype, "; convert it, or use master_dtype float32", who(group));
  }
  TORCH_CHECK_VALUE(
      any, "shardstep: expected bfloat16 parameters with stochastic rounding, got only ",
      params.front().scalar_type(), ", which needs none; leave the option out", who(group));
}

}  // namespace

void check_param(const at::Tensor& param, const std::string& label) {
  TORCH_CHECK_VALUE(param.defined(), "shardstep: expected parameter ", label,
                    " to be a tensor, got an undefined one");
  TORCH_CHECK_VALUE(param.layout() == at::kStrided, "shardstep: expected parameter ", label,
                    " to be dense, got layout ", param.layout());
  TORCH_CHECK_VALUE(is_dense(param), "shardstep: expected parameter ", label,
                    " to fill memory without gaps or overlap, got sizes ", param.sizes(),
                    " and strides ", param.strides());
}

void check_params(const std::vector<at::Tensor>& params, const EngineOptions& options,
                  const ProcessGroupPtr& group) {
  TORCH_CHECK_VALUE(!params.empty(), "shardstep: expected parameters to optimize, got none");
  check_devices(params, group);
  if (options.sharding == Sharding::kParameter) check_one_dtype(params);
  if (options.rounding == Rounding::kStochastic) check_rounding(params, group);
  check_no_overlap(params);
}

// What ranks compare of a cost, in words. Throws ValueError for one that cannot be divided.
std::string describe_cost(std::optional<double> cost, size_t param, const ProcessGroupPtr& group) {
  if (!cost) return "";
  TORCH_CHECK_VALUE(std::isfinite(*cost) && *cost >= 0,
                    "shardstep: expected the cost of parameter ", param,
                    " to be a finite number of 0 or more, got ", *cost, who(group));
  return c10::str(", cost ", *cost);
}

}  // namespace shardstep::detail

#include "shard/gradient_lending.h"

#include <algorithm>

#include "comm/agreement.h"
#include "launch/who.h"

namespace shardstep {
namespace {

// Which of these slices' parameters have a gradient on rank `from`.
std::vector<bool> lent_slices(const ShardEngine& engine, const std::vector<const Slice*>& slices,
                              int from, int to) {
  auto has_gradient = at::zeros({static_cast<int64_t>(slices.size())}, at::kByte);
  auto* flags = has_gradient.mutable_data_ptr<uint8_t>();
  for (size_t i = 0; i < slices.size(); ++i) {
    flags[i] = engine.param(slices[i]->param).grad().defined();
  }
  has_gradient = has_gradient.to(detail::control_device(engine.process_group()));
  engine.exchange()->transfer({has_gradient}, from, to, ControlMessage::kLentGradients)->wait();
  has_gradient = has_gradient.cpu();
  flags = has_gradient.mutable_data_ptr<uint8_t>();
  return std::vector<bool>(flags, flags + slices.size());
}

void lend(const ShardEngine& engine, int from, int to) {
  if (engine.rank() != from && engine.rank() != to) return;
  at::NoGradGuard no_grad;
  const auto slices = engine.partition().owned(to);
  const auto lent = lent_slices(engine, slices, from, to);
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < slices.size(); ++i) {
    const auto& param = engine.param(slices[i]->param);
    auto& gradient = param.mutable_grad();
    if (!lent[i]) {
      gradient.reset();
      continue;
    }
    TORCH_CHECK_VALUE(!gradient.defined() || gradient.layout() == at::kStrided,
                      "shardstep: expected dense gradients with Join, got ", gradient.layout(),
                      detail::who(engine.process_group()));
    if (engine.rank() == to && !gradient.defined()) gradient = at::zeros_like(param);
    gradient = in_order_of(param, gradient);
    parts.push_back(
        flat_view(gradient).narrow(0, slices[i]->elements.begin, slices[i]->elements.size()));
  }
  engine.exchange()->transfer(parts, from, to, ControlMessage::kLentGradients)->wait();
}

}  // namespace

void lend_gradients(ShardEngine& engine, bool has_gradients) {
  if (!engine.exchange() || engine.stage() != 1) return;
  const auto has = detail::all_gather_number(engine.process_group(), has_gradients ? 1 : 0);
  const auto lender = std::find(has.begin(), has.end(), 1);
  if (lender == has.end()) return;
  for (int borrower = 0; borrower < engine.world_size(); ++borrower) {
    if (has[borrower] == 0) lend(engine, static_cast<int>(lender - has.begin()), borrower);
  }
}

}  // namespace shardstep

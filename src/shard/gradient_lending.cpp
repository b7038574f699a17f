#include "shard/gradient_lending.h"

#include <algorithm>

#include "comm/agreement.h"
#include "comm/peer_input.h"
#include "launch/who.h"

namespace shardstep {
namespace {

// By parameter: whether it has a gradient on rank `from`, as that tells rank `to`.
at::Tensor tell_lent(const ShardEngine& engine, int from, int to) {
  auto has_gradient = at::zeros({engine.param_count()}, at::kByte);
  auto* const flags = has_gradient.mutable_data_ptr<uint8_t>();
  for (int64_t i = 0; i < engine.param_count(); ++i) flags[i] = engine.param(i).grad().defined();
  has_gradient = has_gradient.to(detail::control_device(engine.control_group()));
  engine.control().transfer({has_gradient}, from, to, ControlMessage::kLentGradients)->wait();
  return has_gradient.cpu();
}

// The same, checked, as are the gradients that will travel or be received into.
std::vector<bool> lent_params(const ShardEngine& engine, const at::Tensor& told, int from, int to) {
  const auto* const flags = told.const_data_ptr<uint8_t>();
  const detail::PeerInput peer(engine.process_group(), from);
  for (int64_t i = 0; i < engine.param_count(); ++i) {
    peer.check("whether a gradient is lent", flags[i], 0, 1);
  }
  for (const auto* slice : engine.partition().owned(to)) {
    const auto& gradient = engine.param(slice->param).grad();
    TORCH_CHECK_VALUE(
        flags[slice->param] == 0 || !gradient.defined() || gradient.layout() == at::kStrided,
        "shardstep: expected dense gradients with Join, got ", gradient.layout(),
        detail::who(engine.process_group()));
  }
  return std::vector<bool>(flags, flags + engine.param_count());
}

// A frozen parameter travels if it has a gradient: also ranks that own nothing of it must know.
void follow_frozen(const ShardEngine& engine, const std::vector<bool>& lent) {
  for (int64_t i = 0; i < engine.param_count(); ++i) {
    const auto& param = engine.param(i);
    if (param.requires_grad() || param.grad().defined() == lent[i]) continue;
    param.mutable_grad() =
        lent[i] ? at::zeros({}, param.options().requires_grad(false)).expand_as(param)
                : at::Tensor();
  }
}

void lend(const ShardEngine& engine, const std::vector<bool>& lent, int from, int to) {
  at::NoGradGuard no_grad;
  const auto slices = engine.partition().owned(to);
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < slices.size(); ++i) {
    const auto& param = engine.param(slices[i]->param);
    auto& gradient = param.mutable_grad();
    if (!lent[slices[i]->param]) {
      gradient.reset();
      continue;
    }
    if (engine.rank() == to && !gradient.defined()) gradient = at::zeros_like(param);
    gradient = in_order_of(param, gradient);
    parts.push_back(
        flat_view(gradient).narrow(0, slices[i]->elements.begin, slices[i]->elements.size()));
  }
  engine.exchange()->transfer(parts, from, to, ControlMessage::kLentGradients)->wait();
  if (engine.rank() == to) follow_frozen(engine, lent);
}

}  // namespace

void lend_gradients(ShardEngine& engine, bool has_gradients) {
  if (!engine.exchange() || engine.stage() != 1) return;
  const auto has = detail::all_gather_number(engine.control_group(), has_gradients ? 1 : 0);
  const auto lender = std::find(has.begin(), has.end(), 1);
  if (lender == has.end()) return;
  const auto from = static_cast<int>(lender - has.begin());
  std::vector<std::pair<int, at::Tensor>> told;  // borrowers that this rank has to do with
  for (int to = 0; to < engine.world_size(); ++to) {
    const bool mine = engine.rank() == from || engine.rank() == to;
    if (has[to] == 0 && mine) told.emplace_back(to, tell_lent(engine, from, to));
  }
  // Before gradients travel: the others would wait for a rank that cannot lend or borrow.
  std::vector<std::vector<bool>> lent;
  std::exception_ptr error;
  try {
    for (const auto& [to, flags] : told) lent.push_back(lent_params(engine, flags, from, to));
  } catch (...) {
    error = std::current_exception();
  }
  detail::tell_every_rank(engine.control_group(), error);
  for (size_t i = 0; i < told.size(); ++i) lend(engine, lent[i], from, told[i].first);
}

}  // namespace shardstep

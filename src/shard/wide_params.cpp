#include "shard/wide_params.h"

#include <utility>

namespace shardstep {

void widen_params(const std::vector<at::Tensor>& params,
                  const std::map<int64_t, at::Tensor>& masters) {
  for (const auto& [index, master] : masters) {
    if (can_be_widened(params[index])) widen_from_master(params[index], master);
  }
}

at::Tensor WideParams::add(int64_t index, const at::Tensor& param, int64_t first) {
  const auto own = own_(index);
  if (masters_wanted_) {
    return masters_.insert_or_assign(index, Master{param, MasterParam(own)})
        .first->second.master.tensor();
  }
  return copies_.insert_or_assign(index, Copy{TemporaryCopy(own), first})
      .first->second.copy.tensor();
}

void WideParams::forget_from(int64_t index) {
  masters_.erase(masters_.lower_bound(index), masters_.end());
  copies_.erase(copies_.lower_bound(index), copies_.end());
}

void WideParams::follow(int64_t index, bool moved) {
  const auto found = masters_.find(index);
  if (found == masters_.end()) return;  // a temporary copy is made anew for every update
  found->second.master.follow(found->second.param, own_(index), moved);
}

void WideParams::begin_update() {
  for (auto& [index, entry] : masters_) entry.is_updated = entry.master.tensor().grad().defined();
  if (rounding_ != Rounding::kStochastic) return;
  seed_ = draw_rounding_seed();
  for (auto& [index, entry] : copies_) {
    if (entry.copy.tensor().grad().defined()) entry.copy.widen(own_(index));
  }
}

void WideParams::round() {
  for (auto& [index, entry] : masters_) {
    if (!std::exchange(entry.is_updated, false)) continue;
    entry.master.round_into(entry.param, own_(index));
  }
  for (auto& [index, entry] : copies_) {
    if (!entry.copy.has_memory()) continue;
    entry.copy.round_into(own_(index), {.seed = seed_, .param = index, .first = entry.first});
  }
}

void WideParams::param_arrived(int64_t index) {
  const auto found = masters_.find(index);
  if (found != masters_.end()) found->second.master.keep_up_with(found->second.param);
}

at::Tensor WideParams::saved_master(int64_t index) const {
  const auto found = masters_.find(index);
  if (found == masters_.end() || !found->second.master.is_wider()) return {};
  return found->second.master.tensor().detach();
}

bool WideParams::load_masters(const std::map<int64_t, at::Tensor>& masters) {
  bool missing = false;
  for (auto& [index, entry] : masters_) {
    const auto found = masters.find(index);
    const bool given = found != masters.end() && found->second.defined();
    missing = missing || (found != masters.end() && !given);
    given ? entry.master.load(found->second) : entry.master.reset(own_(index));
  }
  return missing;
}

}  // namespace shardstep

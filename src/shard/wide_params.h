#pragma once

// The float32 copies that the local optimizer updates in place of narrow parameters, of what this
// rank owns: masters, which stay, or copies that exist during an update and are rounded
// stochastically into bfloat16 parameters.
// Thread safety: none. Nothing here communicates.

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "shard/engine_options.h"
#include "shard/master_param.h"
#include "shard/stochastic_rounding.h"
#include "shardstep/export.h"

namespace shardstep {

// Parameters without masters that are the rounded values of these take the values, whole.
SHARDSTEP_API void widen_params(const std::vector<at::Tensor>& params,
                                const std::map<int64_t, at::Tensor>& masters);

class SHARDSTEP_API WideParams {
 public:
  // A parameter by its index: what this rank owns of it, in its memory.
  using OwnView = std::function<at::Tensor(int64_t)>;

  WideParams(const EngineOptions& options, OwnView own)
      : masters_wanted_(options.master_dtype.has_value()),
        rounding_(options.rounding),
        own_(std::move(own)) {}

  // Whether the local optimizer updates a copy of parameters of this dtype.
  bool has_copies_of(at::ScalarType dtype) const {
    return masters_wanted_ ? is_narrow(dtype)
                           : rounding_ == Rounding::kStochastic && dtype == at::kBFloat16;
  }
  // Whether these copies are masters.
  bool has_masters_of(at::ScalarType dtype) const { return masters_wanted_ && is_narrow(dtype); }
  // Whether there is a copy of this parameter here.
  bool has(int64_t index) const { return masters_.count(index) + copies_.count(index) > 0; }

  // Returns the tensor that the local optimizer updates. `first`: the place of the first element
  // that this rank owns. REQUIRES: has_copies_of the parameter's dtype.
  at::Tensor add(int64_t index, const at::Tensor& param, int64_t first);
  void forget_from(int64_t index);

  // Before an update, when parameters may have been changed or, if `moved`, got other memory.
  void follow(int64_t index, bool moved);
  // When the copies have their gradients. Every rank draws one seed here, whatever it owns, so that
  // generators that are the same on all ranks stay so.
  void begin_update();
  // Writes what has been updated, rounded, into the parameters. A second call changes nothing.
  void round();

  // When a parameter has arrived from other ranks: some exchanges change its version.
  void param_arrived(int64_t index);

  // What belongs into a saved state under kMasterKey; undefined if there is no master here, or the
  // parameter itself says as much.
  at::Tensor saved_master(int64_t index) const;
  // Masters by parameter, undefined where a state is loaded that has none. These and those that are
  // not mentioned start from their parameters; returns whether there are any of the former.
  bool load_masters(const std::map<int64_t, at::Tensor>& masters);

 private:
  struct Master {
    at::Tensor param;
    MasterParam master;
    bool is_updated = false;  // and not rounded yet
  };
  struct Copy {
    TemporaryCopy copy;
    int64_t first;  // element of the parameter
  };

  bool masters_wanted_;
  Rounding rounding_;
  OwnView own_;
  std::map<int64_t, Master> masters_;  // by parameter
  std::map<int64_t, Copy> copies_;     // likewise
  uint64_t seed_ = 0;                  // of the update under way
};

}  // namespace shardstep

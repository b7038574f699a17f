#pragma once

// Uneven inputs: ranks that run out of inputs shadow the collective calls of the others until all
// have joined. Every Joinable announces its collectives; a joined rank runs the hook of the one
// that was announced, so neither the order of the list nor that of the calls matters; but each
// forward pass of a DistributedDataParallel has its backward pass before the next forward pass, and
// each optimizer of stage 2 that clips or looks at gradients steps before another one does so.
// Collective: Join::finish, and notify_join_context inside a Join. Destruction does not
// communicate. Thread safety: one thread at a time.

#include <torch/arg.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "shardstep/export.h"
#include "shardstep/process_group.h"

namespace shardstep {

struct JoinOptions {
  // If false, Join does nothing: for inputs that are known to be even.
  TORCH_ARG(bool, enable) = true;
  // Throw on every rank as soon as one runs out of inputs.
  TORCH_ARG(bool, throw_on_early_termination) = false;
  // Gradients are averaged over all ranks; if false, over those that still have inputs.
  TORCH_ARG(bool, divide_by_initial_world_size) = true;
};

// What a rank without inputs does instead of a Joinable's own work.
class SHARDSTEP_API JoinHook {
 public:
  virtual ~JoinHook() = default;
  // Makes the collective calls of one announcement.
  virtual void main_hook() {}
  // Called once on every rank when all have joined.
  virtual void post_hook(bool is_last_joiner) {}
};

// An object that makes collective calls in every iteration. Before them it calls
// Join::notify_join_context(*this); its hook makes the same calls.
class SHARDSTEP_API Joinable {
 public:
  Joinable() = default;
  Joinable(const Joinable&) = delete;
  Joinable& operator=(const Joinable&) = delete;
  Joinable(Joinable&&) = default;
  Joinable& operator=(Joinable&&) = default;
  virtual ~Joinable() = default;

  // Called once per Join, on every rank.
  virtual std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) = 0;
  // The device of the messages that Join sends.
  virtual at::Device join_device() const = 0;
  virtual ProcessGroupPtr join_process_group() const = 0;

 protected:
  // Whether this rank has inputs left in a Join.
  bool is_in_join() const { return join_place_.has_value(); }

 private:
  friend class Join;
  struct Place {
    int64_t index;
    int64_t count;
    bool throw_on_early_termination;
  };
  std::optional<Place> join_place_;
};

using Joinables = std::vector<std::reference_wrapper<Joinable>>;

// A scope in which ranks may have different numbers of inputs:
//
//   Join join({ddp, optimizer});
//   for (auto& batch : *loader) { … }
//   join.finish();
//
// An exception that leaves the scope before finish() propagates, and this rank shadows nothing.
class SHARDSTEP_API Join {
 public:
  // REQUIRES: the joinables outlive this, have one process group and device, and are the same, in
  // the same order, on every rank.
  explicit Join(Joinables joinables, const JoinOptions& options = {});
  ~Join();
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

  // Call when this rank has no more inputs: shadows the others until they have none either.
  // Collective.
  void finish();

  // Tells joined ranks that `joinable` is about to communicate. The work's result is the number of
  // ranks that have not joined; null outside a Join. Throws if a rank has joined and
  // throw_on_early_termination is set.
  static c10::intrusive_ptr<c10d::Work> notify_join_context(Joinable& joinable);

 private:
  at::Tensor exchange_message();
  void warn_of_skew(int64_t shadowed);
  void leave();

  Joinables joinables_;
  std::vector<std::unique_ptr<JoinHook>> hooks_;
  JoinOptions options_;
  int exceptions_at_start_;
  bool open_ = false;
};

// Runs `body`, a training loop, inside a Join that ends when it returns.
template <class Body>
void join_uneven(Joinables joinables, const JoinOptions& options, Body&& body) {
  Join join(std::move(joinables), options);
  std::forward<Body>(body)();
  join.finish();
}

}  // namespace shardstep

#pragma once

// The update inside DDP's backward pass: which buckets are being reduced, and when their parameters
// are updated and have arrived. It knows neither the optimizer nor the DDP, so C++ and Python both
// use it. Everything happens on the thread that runs the backward pass. On a device, buckets are
// waited for and updated on a stream beside the one that computes gradients.

#include <ATen/ATen.h>

#include <deque>
#include <functional>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <unordered_set>
#include <utility>
#include <vector>

#include "ddp/side_streams.h"
#include "shardstep/export.h"

namespace shardstep {

enum class UpdateWhen {
  kEachBucket,  // as soon as a bucket has been reduced
  kLastBucket,  // all at once, when the last has
};

enum class ArriveWhen {
  kBackwardEnds,  // parameters are up to date when backward() returns
  kArriveCalled,  // they may be under way until arrive()
};

struct OverlappedStepOptions {
  UpdateWhen update = UpdateWhen::kEachBucket;
  ArriveWhen arrive = ArriveWhen::kArriveCalled;
  // DDP's options.
  bool static_graph = false;
  bool find_unused_parameters = false;
  // Whether ranks may send with different tags in different orders. If not, the time at which a
  // bucket is updated does not depend on when its reduction happens to finish.
  bool any_order = true;
};

// A reduction under way.
struct BucketReduction {
  std::function<bool()> done;
  std::function<at::Tensor()> wait;  // the reduced buffer
};

// What the hook updates; all of it is collective.
struct OverlappedUpdate {
  using Gradients = std::vector<std::pair<at::Tensor, at::Tensor>>;  // by parameter
  // Updates these parameters and starts sending them.
  std::function<void(const Gradients&, int tag)> update;
  // All updates of this iteration have been made. Does not wait.
  std::function<void()> end;
  // Returns when what was sent has arrived.
  std::function<void()> wait;
};

class SHARDSTEP_API OverlappedStep {
 public:
  OverlappedStep(OverlappedStepOptions options, OverlappedUpdate update)
      : options_(options), update_(std::move(update)) {}

  // For DDP's hook to call, once it has started reducing the bucket.
  void reducing(c10d::GradBucket& bucket, BucketReduction reduction);

  // Returns when the parameters are those of the next iteration.
  void arrive();

 private:
  struct Reducing {
    int index;
    BucketReduction reduction;
    at::Tensor buffer;
    std::vector<at::Tensor> params;
    std::vector<at::Tensor> gradients;  // views of the buffer
  };

  bool ddp_decides_at_the_end() const;
  void finish_later();
  void finish();
  void find_unused();
  void update_front();
  void update_reduced();
  OverlappedUpdate::Gradients gradients_of(const Reducing& bucket) const;

  OverlappedStepOptions options_;
  OverlappedUpdate update_;
  std::deque<Reducing> reducing_;
  detail::SideStreams side_streams_;
  std::unordered_set<const void*> unused_;
  bool graph_known_ = false;
  bool postponed_ = false;
};

}  // namespace shardstep

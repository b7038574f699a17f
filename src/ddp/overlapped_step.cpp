#include "ddp/overlapped_step.h"
#include "failure_points.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

namespace shardstep {

void OverlappedStep::reducing(c10d::GradBucket& bucket, BucketReduction reduction) {
  if (bucket.getIndex() == 0) {
    reducing_.clear();  // what a backward pass that threw left behind
    update_.wait();
  }
  SHARDSTEP_FAILURE_POINT("hook: reduces");
  reducing_.push_back({static_cast<int>(bucket.getIndex()), std::move(reduction),
                       bucket.getBuffer(), bucket.getParameters(), bucket.getGradients()});
  if (options_.update == UpdateWhen::kEachBucket && !ddp_decides_at_the_end()) {
    update_reduced();
  }
  if (bucket.isLast()) finish_later();
}

void OverlappedStep::update_reduced() {
  if (options_.any_order) {
    while (!reducing_.empty() && reducing_.front().reduction.done()) update_front();
  } else {
    // All ranks have started to reduce this bucket before they send parameters of the last one.
    while (reducing_.size() > 1) update_front();
  }
}

void OverlappedStep::arrive() {
  if (std::exchange(postponed_, false)) finish();
  side_streams_.join();
  update_.wait();
}

// Parameters that no rank used keep the gradient they had, or none. DDP finds out which these are
// when the backward pass ends; in a static graph, when the first one ends.
bool OverlappedStep::ddp_decides_at_the_end() const {
  return options_.static_graph ? !graph_known_ : options_.find_unused_parameters;
}

// At the end of the backward pass. A rank that has joined has none, so it finishes at once or, if
// it must wait for DDP to decide, when arrive() is called.
void OverlappedStep::finish_later() {
  const bool behind_ddp = ddp_decides_at_the_end();
  if (torch::autograd::get_current_graph_task_id() == -1) {
    postponed_ = behind_ddp;
    if (!behind_ddp) finish();
    return;
  }
  // DDP queues its own callback after this hook; one queued from a callback runs after DDP's.
  auto& engine = torch::autograd::Engine::get_default_engine();
  engine.queue_callback([this, behind_ddp, &engine] {
    if (behind_ddp) {
      engine.queue_callback([this] { finish(); });
    } else {
      finish();
    }
  });
}

void OverlappedStep::finish() {
  if (ddp_decides_at_the_end()) find_unused();
  if (options_.update == UpdateWhen::kEachBucket) {
    while (!reducing_.empty()) update_front();
  } else {
    OverlappedUpdate::Gradients gradients;
    for (const auto& bucket : reducing_) {
      for (auto& gradient : gradients_of(bucket)) gradients.push_back(std::move(gradient));
    }
    reducing_.clear();
    update_.update(gradients, 0);
  }
  update_.end();
  SHARDSTEP_FAILURE_POINT("hook: ended");
  graph_known_ = true;
  if (options_.arrive == ArriveWhen::kBackwardEnds) {
    side_streams_.join();
    update_.wait();
  }
}

void OverlappedStep::find_unused() {
  unused_.clear();
  for (const auto& bucket : reducing_) {
    for (const auto& param : bucket.params) {
      if (!param.grad().defined()) unused_.insert(param.unsafeGetTensorImpl());
    }
  }
}

void OverlappedStep::update_front() {
  const auto bucket = std::move(reducing_.front());
  reducing_.pop_front();
  side_streams_.run(bucket.buffer.device(),
                    [&] { update_.update(gradients_of(bucket), bucket.index); });
  SHARDSTEP_FAILURE_POINT("hook: updated");
}

OverlappedUpdate::Gradients OverlappedStep::gradients_of(const Reducing& bucket) const {
  const auto reduced = bucket.reduction.wait();
  OverlappedUpdate::Gradients gradients;
  for (size_t i = 0; i < bucket.params.size(); ++i) {
    const auto& param = bucket.params[i];
    if (unused_.count(param.unsafeGetTensorImpl()) > 0) continue;
    if (ddp_decides_at_the_end()) {
      gradients.emplace_back(param, param.grad());
      continue;
    }
    const auto& view = bucket.gradients[i];
    const int64_t offset =
        reduced.storage_offset() + view.storage_offset() - bucket.buffer.storage_offset();
    gradients.emplace_back(param, reduced.as_strided(param.sizes(), param.strides(), offset));
  }
  return gradients;
}

}  // namespace shardstep

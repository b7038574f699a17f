#pragma once

// What exchanges have in common whose ranks meet in shared memory.

#include <memory>
#include <string>

#include "comm/exchange.h"
#include "comm/shared/shared_keys.h"
#include "comm/shared/shared_memory.h"

namespace shardstep::detail {

class SharingExchange : public Exchange {
 public:
  SharingExchange(const ProcessGroupPtr& group, int64_t channel,
                  std::shared_ptr<SharedMemory> shared)
      : Exchange(group, channel),
        shared_(std::move(shared)),
        segments_(*shared_),
        tensors_(*shared_) {}

  bool any_order() const override { return true; }
  bool shares_memory() const override { return true; }
  at::Tensor make_shared(int64_t numel, const at::TensorOptions& options) override {
    return tensors_.make(numel, options);
  }

  void give_up(const std::string& message) override { shared_->give_up(message); }
  void start_anew() override {
    shared_->start_anew();
    tensors_.start_anew();
  }

  Traffic traffic() const override {
    auto traffic = Exchange::traffic();
    traffic.bytes_shared = shared_->bytes_copied();
    return traffic;
  }

 protected:
  std::shared_ptr<SharedMemory> shared_;
  BucketSegments segments_;

 private:
  SharedTensors tensors_;
};

}  // namespace shardstep::detail

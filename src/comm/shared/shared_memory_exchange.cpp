#include "comm/shared/shared_memory_exchange.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "comm/pending_works.h"
#include "comm/shared/attended_sums.h"
#include "comm/shared/bucket_segment.h"
#include "comm/shared/piece_ring.h"
#include "comm/shared/piece_sums.h"
#include "comm/shared/shared_keys.h"
#include "comm/shared/sharing_exchange.h"
#include "comm/shared/summed_reduction.h"

namespace shardstep::detail {
namespace {

class PendingGather : public Pending {
 public:
  PendingGather(std::shared_ptr<BucketSegment> segment, Parts parts)
      : segment_(std::move(segment)), parts_(std::move(parts)), round_(segment_->publish(parts_)) {}
  void wait() override { segment_->fetch(parts_, round_); }

 private:
  std::shared_ptr<BucketSegment> segment_;
  Parts parts_;
  uint32_t round_;
};

class SharedMemoryExchange : public SharingExchange {
 public:
  using SharingExchange::SharingExchange;

  const char* name() const override { return "shared_memory"; }

  std::unique_ptr<Pending> all_gather(const Parts& parts, MessageTag tag) override {
    std::vector<int64_t> bytes;
    for (const auto& part : parts) bytes.push_back(bytes_of(part));
    return std::make_unique<PendingGather>(segments_.of(tag, bytes), parts);
  }

  void all_gather_and_wait(const std::vector<const Parts*>& buckets) override {
    // A rank must not create memory and leave before the others have opened it, and with nothing to
    // send no rank would wait.
    const auto is_empty = [](const auto& part) { return bytes_of(part) == 0; };
    if (std::all_of(buckets.begin(), buckets.end(), [&](const Parts* parts) {
          return std::all_of(parts->begin(), parts->end(), is_empty);
        })) {
      return;
    }
    if (!ring_) ring_ = std::make_unique<PieceRing>(*shared_, SharedKey::kRing);
    ring_->all_gather(buckets);
  }

  std::unique_ptr<Pending> reduce_scatter(const Parts& parts, MessageTag tag,
                                          double divisor) override {
    return std::make_unique<PendingSum<Sums, PieceSum>>(
        sums(), sums().start(tag, parts, parts[rank()], SumOptions{.divisor = divisor}));
  }

  std::unique_ptr<Reduction> make_reduction(const ReductionOptions& options) override {
    const auto start = [&sums = sums(), tag = options.tag](const auto&... arguments) {
      return sums.start(tag, arguments...);
    };
    return std::make_unique<SummedReduction<Sums, PieceSum>>(sums(), rank(), options, start);
  }

 private:
  using Sums = AttendedSums<PieceSums>;
  Sums& sums() {
    if (!sums_) sums_ = std::make_unique<Sums>(shared_, SharedKey::kSums);
    return *sums_;
  }

  std::unique_ptr<PieceRing> ring_;
  std::unique_ptr<Sums> sums_;
};

}  // namespace

std::unique_ptr<Exchange> make_shared_memory_exchange(const ProcessGroupPtr& group, int64_t channel,
                                                      std::shared_ptr<SharedMemory> shared) {
  return std::make_unique<SharedMemoryExchange>(group, channel, std::move(shared));
}

}  // namespace shardstep::detail

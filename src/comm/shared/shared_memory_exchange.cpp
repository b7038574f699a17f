#include "comm/shared/shared_memory_exchange.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>

#include "comm/pending_works.h"
#include "comm/shared/bucket_segment.h"
#include "comm/shared/piece_ring.h"
#include "comm/shared/piece_sums.h"
#include "comm/shared/shared_memory.h"

namespace shardstep::detail {
namespace {

// Keys of shared memory. Those of buckets are positive, those of shared tensors lower.
constexpr int64_t kRingKey = -1, kSumsKey = -2, kFirstTensorKey = -3;

class SharedMemoryReduction : public Reduction {
 public:
  SharedMemoryReduction(PieceSums& sums, int rank, const ReductionOptions& options)
      : sums_(sums),
        tag_(options.tag),
        options_{.divisor = options.divisor, .rounded_to = options.wire},
        rank_(rank),
        total_(at::empty({options.numel[rank]}, options.tensor)) {}

  void post(Parts parts, bool squares) override {
    options_.squares = squares;
    std::vector<at::Tensor> into;
    int64_t offset = 0;
    for (const auto& part : parts[rank_]) {
      into.push_back(total_.narrow(0, offset, part.numel()));
      offset += part.numel();
    }
    sum_ = sums_.start(parts, tag_, into, options_);
  }

  bool ready(std::chrono::milliseconds patience) override {
    return sums_.done_by(*sum_, std::chrono::steady_clock::now() + patience);
  }

  at::Tensor finish() override {
    sums_.finish(*sum_);
    return total_;
  }

  std::optional<double> squares() const override {
    return options_.squares ? std::optional(sum_->squares()) : std::nullopt;
  }

  void release() override {}

 private:
  PieceSums& sums_;
  MessageTag tag_;
  SumOptions options_;
  int rank_;
  at::Tensor total_;
  std::shared_ptr<PieceSum> sum_;
};

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

class PendingSum : public Pending {
 public:
  PendingSum(PieceSums& sums, std::shared_ptr<PieceSum> sum) : sums_(sums), sum_(std::move(sum)) {}
  void wait() override { sums_.finish(*sum_); }

 private:
  PieceSums& sums_;
  std::shared_ptr<PieceSum> sum_;
};

class SharedMemoryExchange : public Exchange {
 public:
  SharedMemoryExchange(const ProcessGroupPtr& group, int64_t channel,
                       std::shared_ptr<SharedMemory> shared)
      : Exchange(group, channel), shared_(std::move(shared)) {}

  const char* name() const override { return "shared_memory"; }
  bool any_order() const override { return true; }
  bool shares_memory() const override { return true; }

  std::unique_ptr<Pending> all_gather(const Parts& parts, MessageTag tag) override {
    return std::make_unique<PendingGather>(segment_for(tag, parts), parts);
  }

  void all_gather_and_wait(const std::vector<Parts>& buckets) override {
    // A rank must not make memory and leave before the others have opened it: with nothing to send
    // nobody would wait.
    const auto is_empty = [](const auto& part) { return bytes_of(part) == 0; };
    if (std::all_of(buckets.begin(), buckets.end(), [&](const Parts& parts) {
          return std::all_of(parts.begin(), parts.end(), is_empty);
        })) {
      return;
    }
    if (!ring_) ring_ = std::make_unique<PieceRing>(*shared_, kRingKey);
    ring_->all_gather(buckets);
  }

  std::unique_ptr<Pending> reduce_scatter(const Parts& parts, MessageTag tag,
                                          double divisor) override {
    return std::make_unique<PendingSum>(
        sums(), sums().start(parts, tag, parts[rank()], {.divisor = divisor}));
  }

  std::unique_ptr<Reduction> make_reduction(const ReductionOptions& options) override {
    return std::make_unique<SharedMemoryReduction>(sums(), rank(), options);
  }

  at::Tensor make_shared(int64_t numel, const at::TensorOptions& options) override {
    const int64_t bytes = numel * static_cast<int64_t>(options.dtype().itemsize());
    std::vector<int64_t> of_ranks(world_size(), bytes / world_size());
    of_ranks.back() += bytes % world_size();
    const SegmentLayout layout(0, of_ranks);
    const auto segment = shared_->allocate(kFirstTensorKey - shared_tensors_++, layout);
    // This rank may write before others have reserved what is theirs.
    if (const int error = segment.reserve(0, layout.bytes())) shared_->throw_no_room(bytes, error);
    return at::from_blob(
        segment.memory.get(), {numel}, [memory = segment.memory](void*) {}, options);
  }

  void give_up(const std::string& message) override { shared_->give_up(message); }

 private:
  PieceSums& sums() {
    if (!sums_) sums_ = std::make_unique<PieceSums>(*shared_, kSumsKey);
    return *sums_;
  }

  // Every rank knows all sizes, so all of them come here with the same.
  std::shared_ptr<BucketSegment> segment_for(MessageTag tag, const Parts& parts) {
    std::vector<int64_t> bytes;
    for (const auto& part : parts) bytes.push_back(bytes_of(part));
    auto& [last, made] = segments_[tag.value()];
    if (!last || !last->fits(bytes)) {
      const int64_t key = tag.value() + (++made << MessageTag::kBits);
      last = std::make_shared<BucketSegment>(*shared_, key, bytes);
    }
    return last;
  }

  struct Segments {
    std::shared_ptr<BucketSegment> last;
    int64_t made = 0;
  };
  std::shared_ptr<SharedMemory> shared_;
  std::map<int, Segments> segments_;  // by tag
  std::unique_ptr<PieceRing> ring_;
  std::unique_ptr<PieceSums> sums_;
  int64_t shared_tensors_ = 0;
};

}  // namespace

std::unique_ptr<Exchange> make_shared_memory_exchange(const ProcessGroupPtr& group,
                                                      at::Device device, int64_t channel) {
  if (!device.is_cpu()) return nullptr;
  auto shared = SharedMemory::connect(group);
  if (!shared) return nullptr;
  return std::make_unique<SharedMemoryExchange>(group, channel, std::move(shared));
}

}  // namespace shardstep::detail

#include "comm/hierarchical_exchange.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "comm/agreement.h"
#include "comm/errands.h"
#include "comm/host_sums.h"
#include "comm/pending_works.h"
#include "comm/shared/attended_sums.h"
#include "comm/shared/piece_ring.h"
#include "comm/shared/shared_keys.h"
#include "comm/shared/sharing_exchange.h"
#include "comm/shared/summed_reduction.h"
#include "comm/worker.h"
#include "failure_points.h"

namespace shardstep::detail {
namespace {

// Parts as bytes, so that they can be cut anywhere.
Parts as_bytes(const std::vector<const Parts*>& buckets, int world_size) {
  Parts bytes(world_size);
  for (const auto* parts : buckets) {
    for (int owner = 0; owner < world_size; ++owner) {
      for (const auto& part : (*parts)[owner]) {
        if (part.numel() > 0) bytes[owner].push_back(part.view(at::kByte));
      }
    }
  }
  return bytes;
}

// A gather of which this rank has published what it owns, and receives what it speaks for.
class PendingHostGather : public Pending {
 public:
  struct Stage {
    std::shared_ptr<BucketSegment> segment;
    Parts parts;  // by rank on this host
    uint32_t round = 0;
  };
  // Written by the thread that waits for messages.
  struct Sent {
    SharedCount done{};
  };

  PendingHostGather(SharedMemory& shared, Stage own, Stage received, std::shared_ptr<Sent> sent)
      : shared_(shared),
        own_(std::move(own)),
        received_(std::move(received)),
        sent_(std::move(sent)) {}

  void wait() override {
    own_.segment->fetch(own_.parts, own_.round);
    if (!received_.segment) return;
    received_.segment->fetch_own(received_.parts, received_.round);
    received_.segment->fetch(received_.parts, received_.round);
    // The caller may change what it owns from here on.
    shared_.wait(sent_->done, 1, shared_.rank(),
                 [] { return std::string("the sending of parts"); });
  }

 private:
  SharedMemory& shared_;
  Stage own_, received_;
  std::shared_ptr<Sent> sent_;
};

class HierarchicalExchange : public SharingExchange {
 public:
  using SharingExchange::SharingExchange;

  const char* name() const override { return "hierarchical"; }

  std::unique_ptr<Pending> all_gather(const Parts& parts, MessageTag tag) override;
  void all_gather_and_wait(const std::vector<const Parts*>& buckets) override;
  void all_gather_between_hosts(const std::vector<const Parts*>& buckets) override;

  std::unique_ptr<Pending> reduce_scatter(const Parts& parts, MessageTag tag,
                                          double divisor) override {
    const HostSums::Setting setting{.tag = tag, .message_tag = message_tag(tag)};
    return std::make_unique<PendingSum<Sums, HostSum>>(
        sums(), sums().start(setting, parts, parts[rank()], SumOptions{.divisor = divisor}));
  }

  std::unique_ptr<Reduction> make_reduction(const ReductionOptions& options) override {
    const HostSums::Setting setting{.tag = options.tag,
                                    .message_tag = message_tag(options.tag),
                                    .dtype = options.tensor.dtype().toScalarType()};
    const auto start = [&sums = sums(), setting](const auto&... arguments) {
      return sums.start(setting, arguments...);
    };
    const auto expect = [&sums = sums(), setting](const auto&... arguments) {
      sums.expect(setting, arguments...);
    };
    return std::make_unique<SummedReduction<Sums, HostSum>>(sums(), rank(), options, start, expect);
  }

 private:
  // What a rank receives at a time; the next part arrives while one is passed on.
  static constexpr int64_t kChunkBytes = 8 << 20;
  using Chunk = std::vector<Errand>;

  using Sums = AttendedSums<HostSums>;
  Sums& sums() {
    if (!sums_) sums_ = std::make_unique<Sums>(shared_, group_, watch_, messages_);
    return *sums_;
  }
  std::vector<Errand> errands(size_t host, const Parts& bytes) const;
  std::vector<Chunk> chunks(const std::vector<Errand>& errands, int speaker) const;
  void send_errands(const Parts& bytes, PendingWorks& pending, MessageTag tag);
  void send_chunks(const Parts& bytes, PendingWorks& pending);
  std::vector<std::unique_ptr<PendingWorks>> receive_chunks(const Parts& bytes,
                                                            const std::vector<Chunk>& chunks);
  void wait_or_give_up(Pending& pending);
  Parts on_host(const Parts& bytes) const;
  PendingHostGather::Stage begin_receiving(const Parts& bytes, MessageTag tag,
                                           PendingWorks& arriving);

  std::unique_ptr<PieceRing> ring_;
  std::unique_ptr<Sums> sums_;
  std::unique_ptr<Worker> passing_on_;
};

std::vector<Errand> HierarchicalExchange::errands(size_t host, const Parts& bytes) const {
  constexpr int64_t kLine = 64, kMargin = 64 << 10;
  std::vector<int64_t> owned;
  for (const auto& part : bytes) owned.push_back(bytes_of(part));
  return errands_of_host(shared_->hosts(), host, owned, kLine, kMargin);
}

// What the ranks of this host own.
Parts HierarchicalExchange::on_host(const Parts& bytes) const {
  Parts own;
  for (int rank : shared_->group_ranks()) own.push_back(bytes[rank]);
  return own;
}

void HierarchicalExchange::send_errands(const Parts& bytes, PendingWorks& pending, MessageTag tag) {
  for (size_t host = 0; host < shared_->hosts().count(); ++host) {
    if (host == shared_->host()) continue;
    for (const auto& errand : errands(host, bytes)) {
      if (errand.owner != rank()) continue;
      messages_->add_sent(send(group_, pending, range_of(bytes[rank()], errand.begin, errand.end),
                               errand.speaker, message_tag(tag)));
    }
  }
}

// Starts to receive what this rank speaks for into shared memory.
PendingHostGather::Stage HierarchicalExchange::begin_receiving(const Parts& bytes, MessageTag tag,
                                                               PendingWorks& arriving) {
  PendingHostGather::Stage stage;
  const auto of_host = errands(shared_->host(), bytes);
  for (int speaker : shared_->group_ranks()) {
    auto& parts = stage.parts.emplace_back();
    for (const auto& errand : of_host) {
      if (errand.speaker != speaker) continue;
      const auto range = range_of(bytes[errand.owner], errand.begin, errand.end);
      parts.insert(parts.end(), range.begin(), range.end());
    }
  }
  std::vector<int64_t> sizes;
  for (const auto& part : stage.parts) sizes.push_back(bytes_of(part));
  stage.segment = segments_.of(tag, sizes, 1);
  std::byte* slot = stage.segment->begin_part();
  stage.round = stage.segment->rounds();
  for (const auto& errand : of_host) {
    if (errand.speaker != rank()) continue;
    const auto range = range_of(bytes[errand.owner], errand.begin, errand.end);
    const auto memory = at::from_blob(slot, {errand.size()}, at::kByte);
    messages_->add_received(
        receive(group_, arriving, side_by_side(range, memory), errand.owner, message_tag(tag)));
    slot += errand.size();
  }
  return stage;
}

std::unique_ptr<Pending> HierarchicalExchange::all_gather(const Parts& parts, MessageTag tag) {
  at::NoGradGuard no_grad;
  const auto bytes = as_bytes({&parts}, world_size());
  PendingHostGather::Stage own{nullptr, on_host(bytes)}, received;
  std::vector<int64_t> sizes;
  for (const auto& part : own.parts) sizes.push_back(bytes_of(part));
  own.segment = segments_.of(tag, sizes, 0);
  own.round = own.segment->publish(own.parts);
  auto sent = std::make_shared<PendingHostGather::Sent>();
  if (shared_->hosts().count() > 1) {
    auto arriving = std::make_shared<PendingWorks>(group_, watch_);
    auto leaving = std::make_shared<PendingWorks>(group_, watch_);
    received = begin_receiving(bytes, tag, *arriving);
    send_errands(bytes, *leaving, tag);
    SHARDSTEP_FAILURE_POINT("hosts gather: started");
    if (!passing_on_) passing_on_ = std::make_unique<Worker>();
    passing_on_->run(
        [arriving, leaving, sent, shared = shared_, segment = received.segment] {
          try {
            arriving->wait();
            SHARDSTEP_FAILURE_POINT("hosts gather: arrived");
            segment->end_part();
            leaving->wait();
            shared->raise(sent->done);
          } catch (...) {
            shared->give_up(message_of(std::current_exception()));
          }
          return 0.0;
        },
        {arriving, leaving});
  }
  return std::make_unique<PendingHostGather>(*shared_, std::move(own), std::move(received),
                                             std::move(sent));
}

std::vector<HierarchicalExchange::Chunk> HierarchicalExchange::chunks(
    const std::vector<Errand>& errands, int speaker) const {
  std::vector<Chunk> chunks;
  int64_t room = 0;
  for (auto errand : errands) {
    if (errand.speaker != speaker) continue;
    while (errand.size() > 0) {
      if (room == 0) {
        chunks.emplace_back();
        room = kChunkBytes;
      }
      const int64_t size = std::min(room, errand.size());
      chunks.back().push_back({errand.owner, errand.begin, errand.begin + size, speaker});
      errand.begin += size;
      room -= size;
    }
  }
  return chunks;
}

void HierarchicalExchange::send_chunks(const Parts& bytes, PendingWorks& pending) {
  std::vector<std::vector<Chunk>> by_speaker;
  size_t most = 0;
  for (size_t host = 0; host < shared_->hosts().count(); ++host) {
    if (host == shared_->host()) continue;
    const auto of_host = errands(host, bytes);
    for (int speaker : shared_->hosts().ranks[host]) {
      by_speaker.push_back(chunks(of_host, speaker));
      most = std::max(most, by_speaker.back().size());
    }
  }
  for (size_t c = 0; c < most; ++c) {
    for (const auto& chunks : by_speaker) {
      if (c >= chunks.size()) continue;
      for (const auto& errand : chunks[c]) {
        if (errand.owner != rank()) continue;
        messages_->add_sent(send(group_, pending, range_of(bytes[rank()], errand.begin, errand.end),
                                 errand.speaker, message_tag(MessageTag::bucket(0))));
      }
    }
  }
}

std::vector<std::unique_ptr<PendingWorks>> HierarchicalExchange::receive_chunks(
    const Parts& bytes, const std::vector<Chunk>& chunks) {
  std::vector<std::unique_ptr<PendingWorks>> arriving;
  for (const auto& chunk : chunks) {
    auto& pending = *arriving.emplace_back(std::make_unique<PendingWorks>(group_, watch_));
    for (const auto& errand : chunk) {
      messages_->add_received(receive(group_, pending,
                                      range_of(bytes[errand.owner], errand.begin, errand.end),
                                      errand.owner, message_tag(MessageTag::bucket(0))));
    }
  }
  return arriving;
}

void HierarchicalExchange::wait_or_give_up(Pending& pending) {
  try {
    pending.wait();
  } catch (...) {
    // Ranks of this host wait for what has not arrived here.
    shared_->give_up(message_of(std::current_exception()));
    throw;
  }
}

void HierarchicalExchange::all_gather_and_wait(const std::vector<const Parts*>& buckets) {
  at::NoGradGuard no_grad;
  const auto bytes = as_bytes(buckets, world_size());
  if (std::all_of(bytes.begin(), bytes.end(), [](const auto& part) { return part.empty(); })) {
    return;
  }
  const auto of_host = errands(shared_->host(), bytes);
  std::vector<std::vector<Chunk>> by_speaker;
  size_t most = 0;
  for (int speaker : shared_->group_ranks()) {
    by_speaker.push_back(chunks(of_host, speaker));
    most = std::max(most, by_speaker.back().size());
  }
  const auto arriving = receive_chunks(bytes, by_speaker[shared_->rank()]);
  PendingWorks leaving(group_, watch_);
  send_chunks(bytes, leaving);
  SHARDSTEP_FAILURE_POINT("hosts gather: chunks sent");
  const bool alone = shared_->world_size() == 1;
  if (!alone && !ring_) ring_ = std::make_unique<PieceRing>(*shared_, SharedKey::kRing);
  const auto own = on_host(bytes);
  if (!alone) ring_->all_gather({&own});
  for (size_t c = 0; c < most; ++c) {
    if (c < arriving.size()) wait_or_give_up(*arriving[c]);
    SHARDSTEP_FAILURE_POINT("hosts gather: passes on");
    Parts passed_on;
    for (const auto& chunks : by_speaker) {
      auto& parts = passed_on.emplace_back();
      if (c >= chunks.size()) continue;
      for (const auto& errand : chunks[c]) {
        const auto range = range_of(bytes[errand.owner], errand.begin, errand.end);
        parts.insert(parts.end(), range.begin(), range.end());
      }
    }
    if (!alone) ring_->all_gather({&passed_on});
  }
  wait_or_give_up(leaving);
}

void HierarchicalExchange::all_gather_between_hosts(const std::vector<const Parts*>& buckets) {
  at::NoGradGuard no_grad;
  const auto bytes = as_bytes(buckets, world_size());
  const auto arriving = receive_chunks(bytes, chunks(errands(shared_->host(), bytes), rank()));
  PendingWorks leaving(group_, watch_);
  send_chunks(bytes, leaving);
  for (const auto& chunk : arriving) wait_or_give_up(*chunk);
  wait_or_give_up(leaving);
}

}  // namespace

std::unique_ptr<Exchange> make_hierarchical_exchange(const ProcessGroupPtr& group, int64_t channel,
                                                     std::shared_ptr<SharedMemory> shared) {
  return std::make_unique<HierarchicalExchange>(group, channel, std::move(shared));
}

}  // namespace shardstep::detail

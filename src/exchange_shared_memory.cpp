#include <cstring>
#include <map>

#include "exchanges.h"
#include "pending_works.h"
#include "rank_order_sum.h"
#include "shared_memory.h"

namespace shardstep::detail {
namespace {

constexpr int64_t kLine = 64;

int64_t round_up(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// Shared memory of one tag: for every owner a place for what each other rank adds to its part, and
// counts that say who has got how far. The first of an owner's places also serves to publish its
// part to all; by then what was added up there has been used.
class Area {
 public:
  Area(SharedMemory& shared, int world_size, std::vector<int64_t> bytes)
      : world_size_(world_size), bytes_(std::move(bytes)) {
    int64_t size = kKinds * world_size * static_cast<int64_t>(sizeof(SharedCount));
    for (int owner = 0; owner < world_size; ++owner) {
      begin_.push_back(size);
      size += round_up(bytes_[owner]) * (world_size - 1);
    }
    memory_ = shared.allocate(size);
  }

  bool fits(const std::vector<int64_t>& bytes) const {
    for (size_t rank = 0; rank < bytes.size(); ++rank) {
      if (bytes[rank] > bytes_[rank]) return false;
    }
    return true;
  }

  SharedCount& posted(int rank) { return count(0, rank); }     // rounds it has put in place
  SharedCount& taken(int rank) { return count(1, rank); }      // rounds it has added up
  SharedCount& published(int rank) { return count(2, rank); }  // times it showed its part to all
  SharedCount& fetched(int rank) { return count(3, rank); }    // times it read everyone's

  std::byte* place(int owner, int source) {
    const int nth = source < owner ? source : source - 1;
    return memory_.get() + begin_[owner] + nth * round_up(bytes_[owner]);
  }
  std::byte* shown(int owner) { return memory_.get() + begin_[owner]; }
  const std::shared_ptr<std::byte>& memory() const { return memory_; }

  uint32_t rounds = 0;   // this rank's, begun
  uint32_t gathers = 0;  // this rank's, begun

 private:
  static constexpr int64_t kKinds = 4;
  SharedCount& count(int kind, int rank) {
    return reinterpret_cast<SharedCount*>(memory_.get())[kind * world_size_ + rank];
  }

  int world_size_;
  std::vector<int64_t> bytes_;
  std::vector<int64_t> begin_;  // of each owner's places
  std::shared_ptr<std::byte> memory_;
};

void copy_in(const std::vector<at::Tensor>& tensors, std::byte* to) {
  for (const auto& tensor : tensors) {
    std::memcpy(to, tensor.const_data_ptr(), tensor.nbytes());
    to += tensor.nbytes();
  }
}

void copy_out(const std::byte* from, const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    std::memcpy(tensor.mutable_data_ptr(), from, tensor.nbytes());
    from += tensor.nbytes();
  }
}

class SharedMemoryExchange : public Exchange {
 public:
  SharedMemoryExchange(const ProcessGroupPtr& group, int64_t channel,
                       std::shared_ptr<SharedMemory> shared)
      : Exchange(group, channel), shared_(std::move(shared)) {}

  const char* name() const override { return "shared_memory"; }
  bool any_order() const override { return true; }

  std::unique_ptr<Pending> all_gather(const Parts& parts, int tag) override {
    auto area = area_for(tag, sizes_of(parts));
    const auto what = [tag] { return c10::str("the reading of what was sent with tag ", tag); };
    for (int other = 0; other < world_size(); ++other) {
      if (other != rank()) shared_->wait(area->fetched(other), area->gathers, other, what);
    }
    copy_in(parts[rank()], area->shown(rank()));
    shared_->raise(area->published(rank()));
    ++area->gathers;
    return std::make_unique<Gathering>(*this, area, parts, tag);
  }

  std::unique_ptr<Pending> reduce_scatter(const Parts& parts, int tag, double divisor) override {
    auto area = area_for(tag, sizes_of(parts));
    post(*area, parts, tag);
    return std::make_unique<Reducing>(*this, area, parts[rank()], tag, divisor);
  }

  std::unique_ptr<Reduction> make_reduction(const ReductionOptions& options) override;

  void post(Area& area, const Parts& parts, int tag) {
    const auto what = [tag] { return c10::str("the adding up of bucket ", tag); };
    for (int other = 0; other < world_size(); ++other) {
      if (other == rank()) continue;
      shared_->wait(area.fetched(other), area.gathers, other, what);
      shared_->wait(area.taken(other), area.rounds, other, what);
    }
    for (int owner = 0; owner < world_size(); ++owner) {
      if (owner != rank()) copy_in(parts[owner], area.place(owner, rank()));
    }
    shared_->raise(area.posted(rank()));
    ++area.rounds;
  }

  bool everyone_posted(Area& area) {
    for (int other = 0; other < world_size(); ++other) {
      if (!SharedMemory::reached(area.posted(other), area.rounds)) return false;
    }
    return true;
  }

  // Adds up what all ranks posted for this one's parts.
  void add_up(Area& area, const std::vector<at::Tensor>& own, const std::vector<at::Tensor>& into,
              int tag, double divisor) {
    const auto what = [tag] { return c10::str("the gradients of bucket ", tag); };
    for (int other = 0; other < world_size(); ++other) {
      if (other != rank()) shared_->wait(area.posted(other), area.rounds, other, what);
    }
    int64_t offset = 0;
    for (size_t i = 0; i < own.size(); ++i) {
      std::vector<at::Tensor> terms;
      for (int source = 0; source < world_size(); ++source) {
        terms.push_back(source == rank() ? own[i]
                                         : at::from_blob(area.place(rank(), source) + offset,
                                                         {own[i].numel()}, own[i].options()));
      }
      sum_in_rank_order(terms, into[i], divisor);
      offset += static_cast<int64_t>(own[i].nbytes());
    }
  }

  // What was posted for this rank may be overwritten.
  void let_go(Area& area) { shared_->raise(area.taken(rank())); }

 private:
  class Gathering : public Pending {
   public:
    Gathering(SharedMemoryExchange& exchange, std::shared_ptr<Area> area, Parts parts, int tag)
        : exchange_(exchange),
          area_(std::move(area)),
          round_(area_->gathers),
          parts_(std::move(parts)),
          tag_(tag) {}

    void wait() override {
      const auto what = [this] { return c10::str("what is sent with tag ", tag_); };
      for (int distance = 1; distance < exchange_.world_size(); ++distance) {
        const int owner = (exchange_.rank() + distance) % exchange_.world_size();
        exchange_.shared_->wait(area_->published(owner), round_, owner, what);
        copy_out(area_->shown(owner), parts_[owner]);
      }
      exchange_.shared_->raise(area_->fetched(exchange_.rank()));
    }

   private:
    SharedMemoryExchange& exchange_;
    std::shared_ptr<Area> area_;
    uint32_t round_;
    Parts parts_;
    int tag_;
  };

  class Reducing : public Pending {
   public:
    Reducing(SharedMemoryExchange& exchange, std::shared_ptr<Area> area,
             std::vector<at::Tensor> own, int tag, double divisor)
        : exchange_(exchange),
          area_(std::move(area)),
          own_(std::move(own)),
          tag_(tag),
          divisor_(divisor) {}
    void wait() override {
      exchange_.add_up(*area_, own_, own_, tag_, divisor_);
      exchange_.let_go(*area_);
    }

   private:
    SharedMemoryExchange& exchange_;
    std::shared_ptr<Area> area_;
    std::vector<at::Tensor> own_;
    int tag_;
    double divisor_;
  };

  static std::vector<int64_t> sizes_of(const Parts& parts) {
    std::vector<int64_t> bytes;
    for (const auto& part : parts) bytes.push_back(bytes_of(part));
    return bytes;
  }

  // Every rank knows all sizes, so all of them come here with the same.
  std::shared_ptr<Area> area_for(int tag, const std::vector<int64_t>& bytes) {
    auto& area = areas_[tag];
    if (!area || !area->fits(bytes)) area = std::make_shared<Area>(*shared_, world_size(), bytes);
    return area;
  }

  std::shared_ptr<SharedMemory> shared_;
  std::map<int, std::shared_ptr<Area>> areas_;
};

class SharedMemoryReduction : public Reduction {
 public:
  SharedMemoryReduction(SharedMemoryExchange& exchange, std::shared_ptr<Area> area, int rank,
                        const ReductionOptions& options)
      : exchange_(exchange),
        area_(std::move(area)),
        tag_(options.tag),
        divisor_(options.divisor),
        rank_(rank) {
    // The sum takes the place of its first term.
    sum_ = at::from_blob(
        area_->shown(rank), {options.numel[rank]}, [memory = area_->memory()](void*) {},
        options.tensor);
  }

  void post(Parts parts) override {
    exchange_.post(*area_, parts, tag_);
    own_ = std::move(parts[rank_]);
  }

  bool ready() override { return exchange_.everyone_posted(*area_); }

  at::Tensor finish() override {
    std::vector<at::Tensor> into;
    int64_t offset = 0;
    for (const auto& part : own_) {
      into.push_back(sum_.narrow(0, offset, part.numel()));
      offset += part.numel();
    }
    exchange_.add_up(*area_, own_, into, tag_, divisor_);
    own_.clear();
    return sum_;
  }

  void release() override { exchange_.let_go(*area_); }

 private:
  SharedMemoryExchange& exchange_;
  std::shared_ptr<Area> area_;
  int tag_;
  double divisor_;
  int rank_;
  std::vector<at::Tensor> own_;
  at::Tensor sum_;
};

std::unique_ptr<Reduction> SharedMemoryExchange::make_reduction(const ReductionOptions& options) {
  std::vector<int64_t> bytes;
  for (int64_t numel : options.numel) {
    bytes.push_back(numel * static_cast<int64_t>(options.tensor.dtype().itemsize()));
  }
  return std::make_unique<SharedMemoryReduction>(*this, area_for(options.tag, bytes), rank(),
                                                 options);
}

}  // namespace

std::unique_ptr<Exchange> make_shared_memory_exchange(const ProcessGroupPtr& group,
                                                      at::Device device, int64_t channel) {
  if (!device.is_cpu()) return nullptr;
  auto shared = SharedMemory::connect(group);
  if (!shared) return nullptr;
  return std::make_unique<SharedMemoryExchange>(group, channel, std::move(shared));
}

}  // namespace shardstep::detail

#include <algorithm>
#include <cstring>
#include <map>

#include "comm/exchanges.h"
#include "comm/pending_works.h"
#include "comm/rank_order_sum.h"
#include "comm/shared/copy_past_caches.h"
#include "comm/shared/shared_memory.h"

namespace shardstep::detail {
namespace {

constexpr int64_t kLine = 64;

int64_t round_up(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// Shared memory of one tag: for every owner a place for what each other rank adds to its part, if
// parts are added up, and counts that say who has got how far. The first of an owner's places also
// serves to publish its part to all; by then what was added up there has been used.
class Area {
 public:
  // `places` an owner: 1 to publish, world size - 1 to add up as well.
  Area(SharedMemory& shared, int64_t key, int world_size, int places, std::vector<int64_t> bytes)
      : world_size_(world_size), places_(places), bytes_(std::move(bytes)) {
    int64_t size = kKinds * world_size * static_cast<int64_t>(sizeof(SharedCount));
    for (int owner = 0; owner < world_size; ++owner) {
      begin_.push_back(size);
      size += round_up(bytes_[owner]) * places;
    }
    memory_ = shared.allocate(key, size);
  }

  bool fits(int places, const std::vector<int64_t>& bytes) const {
    if (places > places_) return false;
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
  int places_;
  std::vector<int64_t> bytes_;
  std::vector<int64_t> begin_;  // of each owner's places
  std::shared_ptr<std::byte> memory_;
};

void copy_in(const std::vector<at::Tensor>& tensors, std::byte* to,
             std::optional<at::ScalarType> as = std::nullopt) {
  for (const auto& tensor : tensors) {
    if (as && *as != tensor.scalar_type()) {
      auto place = at::from_blob(to, {tensor.numel()}, tensor.options().dtype(*as));
      place.copy_(tensor);
      to += place.nbytes();
    } else {
      const auto bytes = static_cast<int64_t>(tensor.nbytes());
      copy_past_caches(to, static_cast<const std::byte*>(tensor.const_data_ptr()), bytes);
      to += bytes;
    }
  }
}

void copy_out(const std::byte* from, const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    std::memcpy(tensor.mutable_data_ptr(), from, tensor.nbytes());
    from += tensor.nbytes();
  }
}

// Goes through the bytes of tensors, one behind the other.
class Cursor {
 public:
  void add(const std::vector<at::Tensor>& tensors) {
    tensors_.insert(tensors_.end(), tensors.begin(), tensors.end());
    left_ += bytes_of(tensors);
  }
  int64_t left() const { return left_; }

  void read(std::byte* to, int64_t bytes) {
    advance(bytes, [&](std::byte* at, int64_t size) {
      std::memcpy(to, at, size);
      to += size;
    });
  }
  void write(const std::byte* from, int64_t bytes) {
    advance(bytes, [&](std::byte* at, int64_t size) {
      copy_past_caches(at, from, size);
      from += size;
    });
  }

 private:
  // As far as there are bytes.
  template <class Visit>
  void advance(int64_t bytes, Visit visit) {
    while (bytes > 0 && tensor_ < tensors_.size()) {
      const auto& tensor = tensors_[tensor_];
      const auto end = static_cast<int64_t>(tensor.nbytes());
      const int64_t size = std::min(bytes, end - offset_);
      if (size > 0) visit(static_cast<std::byte*>(tensor.mutable_data_ptr()) + offset_, size);
      offset_ += size;
      bytes -= size;
      left_ -= size;
      if (offset_ < end) continue;
      ++tensor_;
      offset_ = 0;
    }
  }

  std::vector<at::Tensor> tensors_;
  size_t tensor_ = 0;
  int64_t offset_ = 0;
  int64_t left_ = 0;
};

// What every rank owns flows to all others in pieces, through places so small that they stay in the
// caches. Pieces count on for ever; a rank without bytes sends empty ones.
class Stream {
 public:
  Stream(SharedMemory& shared, int rank, int world_size)
      : shared_(shared), rank_(rank), world_size_(world_size) {
    const int64_t counts = 2 * world_size * static_cast<int64_t>(sizeof(SharedCount));
    memory_ = shared.allocate(kKey, counts + world_size * kPlaces * kPiece);
    places_ = memory_.get() + counts;
  }

  // By owner.
  void run(std::vector<Cursor>& parts) {
    int64_t bytes = 0;
    for (const auto& part : parts) bytes = std::max(bytes, part.left());
    const auto pieces = static_cast<uint32_t>((bytes + kPiece - 1) / kPiece);
    const uint32_t end = fetched_ + pieces;
    while (fetched_ != end) {
      while (published_ != end && published_ - fetched_ <= kAhead) publish(parts[rank_]);
      fetch(parts);
    }
  }

 private:
  static constexpr int64_t kKey = -1;  // areas have positive ones, shared tensors lower ones
  static constexpr int64_t kPiece = 512 * 1024;
  static constexpr uint32_t kPlaces = 4;
  static constexpr uint32_t kAhead = 2;  // less than places: others need not keep in step

  SharedCount& published(int rank) { return reinterpret_cast<SharedCount*>(memory_.get())[rank]; }
  SharedCount& fetched(int rank) { return published(world_size_ + rank); }
  std::byte* place(int owner, uint32_t piece) {
    return places_ + (owner * kPlaces + piece % kPlaces) * kPiece;
  }

  void publish(Cursor& own) {
    const auto what = [] { return std::string("the reading of parameters"); };
    for (int other = 0; other < world_size_; ++other) {
      if (other != rank_) shared_.wait(fetched(other), published_ + 1 - kPlaces, other, what);
    }
    own.read(place(rank_, published_), kPiece);
    shared_.raise(published(rank_));
    ++published_;
  }

  void fetch(std::vector<Cursor>& parts) {
    const auto what = [] { return std::string("the parameters"); };
    for (int distance = 1; distance < world_size_; ++distance) {
      const int owner = (rank_ + distance) % world_size_;
      shared_.wait(published(owner), fetched_ + 1, owner, what);
      parts[owner].write(place(owner, fetched_), kPiece);
    }
    shared_.raise(fetched(rank_));
    ++fetched_;
  }

  SharedMemory& shared_;
  int rank_;
  int world_size_;
  std::shared_ptr<std::byte> memory_;
  std::byte* places_;
  uint32_t published_ = 0;  // by this rank
  uint32_t fetched_ = 0;
};

class SharedMemoryExchange : public Exchange {
 public:
  SharedMemoryExchange(const ProcessGroupPtr& group, int64_t channel,
                       std::shared_ptr<SharedMemory> shared)
      : Exchange(group, channel), shared_(std::move(shared)) {}

  const char* name() const override { return "shared_memory"; }
  bool any_order() const override { return true; }

  std::unique_ptr<Pending> all_gather(const Parts& parts, int tag) override {
    auto area = area_for(tag, /*places=*/1, sizes_of(parts));
    const auto what = [tag] { return c10::str("the reading of what was sent with tag ", tag); };
    for (int other = 0; other < world_size(); ++other) {
      if (other != rank()) shared_->wait(area->fetched(other), area->gathers, other, what);
    }
    copy_in(parts[rank()], area->shown(rank()));
    shared_->raise(area->published(rank()));
    ++area->gathers;
    return std::make_unique<Gathering>(*this, area, parts, tag);
  }

  void all_gather_and_wait(const std::vector<Parts>& buckets) override {
    std::vector<Cursor> owners(world_size());
    for (const auto& parts : buckets) {
      for (int owner = 0; owner < world_size(); ++owner) owners[owner].add(parts[owner]);
    }
    // A rank must not make memory and leave before the others have opened it: with nothing to send
    // nobody would wait.
    if (std::all_of(owners.begin(), owners.end(), [](const auto& o) { return o.left() == 0; })) {
      return;
    }
    if (!stream_) stream_ = std::make_unique<Stream>(*shared_, rank(), world_size());
    stream_->run(owners);
  }

  std::unique_ptr<Pending> reduce_scatter(const Parts& parts, int tag, double divisor) override {
    auto area = area_for(tag, world_size() - 1, sizes_of(parts));
    post(*area, parts, tag);
    return std::make_unique<Reducing>(*this, area, parts[rank()], tag, divisor);
  }

  std::unique_ptr<Reduction> make_reduction(const ReductionOptions& options) override;

  at::Tensor make_shared(int64_t numel, const at::TensorOptions& options) override {
    const int64_t key = -2 - shared_tensors_++;
    auto memory = shared_->allocate(key, numel * static_cast<int64_t>(options.dtype().itemsize()));
    void* const data = memory.get();
    return at::from_blob(data, {numel}, [memory = std::move(memory)](void*) {}, options);
  }

  void post(Area& area, const Parts& parts, int tag,
            std::optional<at::ScalarType> wire = std::nullopt) {
    const auto what = [tag] { return c10::str("the adding up of bucket ", tag); };
    for (int other = 0; other < world_size(); ++other) {
      if (other == rank()) continue;
      shared_->wait(area.fetched(other), area.gathers, other, what);
      shared_->wait(area.taken(other), area.rounds, other, what);
    }
    for (int owner = 0; owner < world_size(); ++owner) {
      if (owner != rank()) copy_in(parts[owner], area.place(owner, rank()), wire);
    }
    shared_->raise(area.posted(rank()));
    ++area.rounds;
  }

  bool everyone_posted(Area& area, std::chrono::milliseconds patience) {
    const auto end = std::chrono::steady_clock::now() + patience;
    for (int other = 0; other < world_size(); ++other) {
      if (!shared_->reaches(area.posted(other), area.rounds, other, end)) return false;
    }
    return true;
  }

  // Adds up what all ranks posted for this one's parts. Returns their squares if asked to.
  double add_up(Area& area, const std::vector<at::Tensor>& own, const std::vector<at::Tensor>& into,
                int tag, const SumOptions& options) {
    const auto what = [tag] { return c10::str("the gradients of bucket ", tag); };
    for (int other = 0; other < world_size(); ++other) {
      if (other != rank()) shared_->wait(area.posted(other), area.rounds, other, what);
    }
    int64_t offset = 0;
    double squares = 0;
    for (size_t i = 0; i < own.size(); ++i) {
      const auto posted = own[i].options().dtype(options.rounded_to.value_or(own[i].scalar_type()));
      std::vector<at::Tensor> terms;
      for (int source = 0; source < world_size(); ++source) {
        terms.push_back(source == rank() ? own[i]
                                         : at::from_blob(area.place(rank(), source) + offset,
                                                         {own[i].numel()}, posted));
      }
      squares += sum_in_rank_order(terms, into[i], options);
      offset += own[i].numel() * static_cast<int64_t>(posted.dtype().itemsize());
    }
    return squares;
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
      exchange_.add_up(*area_, own_, own_, tag_, {.divisor = divisor_});
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
  std::shared_ptr<Area> area_for(int tag, int places, const std::vector<int64_t>& bytes) {
    auto& [area, made] = areas_[tag];
    if (!area || !area->fits(places, bytes)) {
      const int64_t key = int64_t{tag} + (++made << 16);
      area = std::make_shared<Area>(*shared_, key, world_size(), places, bytes);
    }
    return area;
  }

  std::shared_ptr<SharedMemory> shared_;
  struct Areas {
    std::shared_ptr<Area> last;
    int64_t made = 0;
  };
  std::map<int, Areas> areas_;  // by tag
  std::unique_ptr<Stream> stream_;
  int64_t shared_tensors_ = 0;
};

class SharedMemoryReduction : public Reduction {
 public:
  SharedMemoryReduction(SharedMemoryExchange& exchange, std::shared_ptr<Area> area, int rank,
                        const ReductionOptions& options)
      : exchange_(exchange),
        area_(std::move(area)),
        tag_(options.tag),
        options_{.divisor = options.divisor, .rounded_to = options.wire},
        rank_(rank) {
    if (options.wire) {
      sum_ = at::empty({options.numel[rank]}, options.tensor);
      return;
    }
    // The sum takes the place of its first term.
    sum_ = at::from_blob(
        area_->shown(rank), {options.numel[rank]}, [memory = area_->memory()](void*) {},
        options.tensor);
  }

  void post(Parts parts, bool squares) override {
    options_.squares = squares;
    exchange_.post(*area_, parts, tag_, options_.rounded_to);
    own_ = std::move(parts[rank_]);
  }

  bool ready(std::chrono::milliseconds patience) override {
    return exchange_.everyone_posted(*area_, patience);
  }

  at::Tensor finish() override {
    std::vector<at::Tensor> into;
    int64_t offset = 0;
    for (const auto& part : own_) {
      into.push_back(sum_.narrow(0, offset, part.numel()));
      offset += part.numel();
    }
    squares_ = exchange_.add_up(*area_, own_, into, tag_, options_);
    own_.clear();
    return sum_;
  }

  std::optional<double> squares() const override {
    return options_.squares ? std::optional(squares_) : std::nullopt;
  }

  void release() override { exchange_.let_go(*area_); }

 private:
  SharedMemoryExchange& exchange_;
  std::shared_ptr<Area> area_;
  int tag_;
  SumOptions options_;
  int rank_;
  std::vector<at::Tensor> own_;
  at::Tensor sum_;
  double squares_ = 0;
};

std::unique_ptr<Reduction> SharedMemoryExchange::make_reduction(const ReductionOptions& options) {
  const auto posted = options.wire ? options.tensor.dtype(*options.wire) : options.tensor;
  std::vector<int64_t> bytes;
  for (int64_t numel : options.numel) {
    bytes.push_back(numel * static_cast<int64_t>(posted.dtype().itemsize()));
  }
  return std::make_unique<SharedMemoryReduction>(
      *this, area_for(options.tag, world_size() - 1, bytes), rank(), options);
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

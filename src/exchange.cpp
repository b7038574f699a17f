#include "shardstep/exchange.h"

#include <algorithm>
#include <functional>
#include <optional>

namespace shardstep {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// c10d works, each with what to say when it fails, and what to do when all have arrived.
class PendingWorks : public Pending {
 public:
  explicit PendingWorks(const ProcessGroupPtr& group)
      : rank_(group->getRank()), world_size_(group->getSize()) {}

  void add(WorkPtr work, const char* verb, int peer) {
    works_.push_back({std::move(work), verb, peer});
  }
  // Holds on to tensors that the works only point at.
  void keep(std::vector<at::Tensor> tensors) {
    kept_.insert(kept_.end(), tensors.begin(), tensors.end());
  }
  void then(std::function<void()> finish) { finish_ = std::move(finish); }

  void wait() override {
    for (auto& [work, verb, peer] : works_) {
      const auto context = c10::str("shardstep: while ", verb, " rank ", peer, " (rank ", rank_,
                                    " of ", world_size_, ")");
      try {
        work->wait();
      } catch (c10::Error& error) {
        error.add_context(context);
        throw;
      } catch (const std::exception& error) {
        throw std::runtime_error(c10::str(error.what(), "\n", context));
      }
    }
    works_.clear();
    if (finish_) finish_();
  }

 private:
  struct Item {
    WorkPtr work;
    const char* verb;
    int peer;
  };
  int rank_;
  int world_size_;
  std::vector<Item> works_;
  std::vector<at::Tensor> kept_;
  std::function<void()> finish_;
};

int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

// Pieces of a size at which Gloo keeps both directions busy; one message of everything is a third
// slower (docs/performance.md). Nothing for a tensor that holds nothing.
std::vector<at::Tensor> pieces(const at::Tensor& tensor) {
  constexpr int64_t kPieceBytes = 8 << 20;
  if (tensor.numel() == 0) return {};
  return tensor.split(std::max<int64_t>(1, kPieceBytes / tensor.element_size()));
}

// Starts messages for all tensors; says how many bytes that makes.
int64_t send(const ProcessGroupPtr& group, PendingWorks& pending,
             const std::vector<at::Tensor>& tensors, int to, int tag) {
  for (const auto& tensor : tensors) {
    for (const auto& piece : pieces(tensor)) {
      std::vector<at::Tensor> one{piece};
      pending.add(group->send(one, to, tag), "sending to", to);
    }
  }
  pending.keep(tensors);
  return bytes_of(tensors);
}

int64_t receive(const ProcessGroupPtr& group, PendingWorks& pending,
                const std::vector<at::Tensor>& tensors, int from, int tag) {
  for (const auto& tensor : tensors) {
    for (const auto& piece : pieces(tensor)) {
      std::vector<at::Tensor> one{piece};
      pending.add(group->recv(one, from, tag), "waiting for", from);
    }
  }
  pending.keep(tensors);
  return bytes_of(tensors);
}

// Parts that lie side by side in one storage, one of equal size a rank: the tensor they make up.
std::optional<at::Tensor> joined(const Parts& parts) {
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    if (parts[rank].size() != 1) return std::nullopt;
    const auto& first = parts.front().front();
    const auto& part = parts[rank].front();
    if (part.numel() != first.numel() || !part.storage().is_alias_of(first.storage()) ||
        part.storage_offset() !=
            first.storage_offset() + static_cast<int64_t>(rank) * first.numel()) {
      return std::nullopt;
    }
  }
  const auto& first = parts.front().front();
  return first.as_strided({static_cast<int64_t>(parts.size()) * first.numel()}, {1},
                          first.storage_offset());
}

// Memory to receive into, used again and again: glibc gives large blocks back to the kernel when
// they are freed, and then every page of a new one faults.
class Scratch {
 public:
  // At least `numel` elements.
  at::Tensor take(int64_t numel, const at::TensorOptions& options) {
    auto best = spare_.end();
    for (auto one = spare_.begin(); one != spare_.end(); ++one) {
      const bool fits = one->numel() >= numel && one->device() == options.device() &&
                        one->dtype() == options.dtype();
      if (fits && (best == spare_.end() || one->numel() < best->numel())) best = one;
    }
    if (best == spare_.end()) return at::empty({numel}, options);
    auto taken = std::move(*best);
    spare_.erase(best);
    return taken;
  }
  void give_back(std::vector<at::Tensor> tensors) {
    for (auto& tensor : tensors) spare_.push_back(std::move(tensor));
  }

 private:
  std::vector<at::Tensor> spare_;
};

// Tensors like `parts`, side by side in `memory`.
std::vector<at::Tensor> laid_out_like(const std::vector<at::Tensor>& parts,
                                      const at::Tensor& memory) {
  std::vector<at::Tensor> views;
  int64_t offset = 0;
  for (const auto& part : parts) {
    views.push_back(memory.narrow(0, offset, part.numel()));
    offset += part.numel();
  }
  return views;
}

class PairwiseExchange : public Exchange {
 public:
  using Exchange::Exchange;

  const char* name() const override { return "pairwise"; }

  std::unique_ptr<Pending> all_gather(const Parts& parts, int tag) override {
    auto pending = std::make_unique<PendingWorks>(group_);
    for (int distance = 1; distance < world_size(); ++distance) {
      const int source = (rank() - distance + world_size()) % world_size();
      traffic_.bytes_received += receive(group_, *pending, parts[source], source, message_tag(tag));
    }
    for (int distance = 1; distance < world_size(); ++distance) {
      const int target = (rank() + distance) % world_size();
      traffic_.bytes_sent += send(group_, *pending, parts[rank()], target, message_tag(tag));
    }
    return pending;
  }

  std::unique_ptr<Pending> reduce_scatter(const Parts& parts, int tag, double divisor) override {
    auto pending = std::make_unique<PendingWorks>(group_);
    const auto& own = parts[rank()];
    int64_t own_numel = 0;
    for (const auto& part : own) own_numel += part.numel();
    std::vector<at::Tensor> memory;
    Parts received(world_size());
    for (int distance = 1; distance < world_size() && own_numel > 0; ++distance) {
      const int source = (rank() - distance + world_size()) % world_size();
      memory.push_back(scratch_->take(own_numel, own.front().options()));
      received[source] = laid_out_like(own, memory.back());
      traffic_.bytes_received +=
          receive(group_, *pending, received[source], source, message_tag(tag));
    }
    for (int distance = 1; distance < world_size(); ++distance) {
      const int target = (rank() + distance) % world_size();
      traffic_.bytes_sent += send(group_, *pending, parts[target], target, message_tag(tag));
    }
    if (own_numel > 0) {
      pending->then([own, received, memory, divisor, self = rank(), scratch = scratch_] {
        for (size_t i = 0; i < own.size(); ++i) {
          std::vector<at::Tensor> terms;
          for (const auto& parts : received) terms.push_back(parts.empty() ? own[i] : parts[i]);
          average(terms, self, divisor);
        }
        scratch->give_back(memory);
      });
    }
    return pending;
  }

 private:
  // (((g0 + g1) + g2) + …) / divisor, in terms[self]; the other terms are lost. Block by block, so
  // that what is added and divided is still in the cache.
  static void average(const std::vector<at::Tensor>& terms, size_t self, double divisor) {
    constexpr int64_t kBlock = 1 << 16;
    const int64_t numel = terms[self].numel();
    for (int64_t begin = 0; begin < numel; begin += kBlock) {
      const auto block = [&](size_t rank) {
        return terms[rank].narrow(0, begin, std::min(kBlock, numel - begin));
      };
      auto into = block(self), sum = block(0);
      for (size_t rank = 1; rank < terms.size(); ++rank) {
        if (rank < self) {
          sum.add_(block(rank));
        } else {
          at::add_out(into, sum, block(rank));
          sum = into;
        }
      }
      if (divisor != 1) into.div_(divisor);
    }
  }

  std::shared_ptr<Scratch> scratch_ = std::make_shared<Scratch>();
};

class NativeExchange : public Exchange {
 public:
  using Exchange::Exchange;

  const char* name() const override { return "native"; }

  std::unique_ptr<Pending> all_gather(const Parts& parts, int) override {
    auto pending = std::make_unique<PendingWorks>(group_);
    if (auto whole = joined(parts)) {
      at::Tensor own = parts[rank()].front();
      pending->add(group_->all_gather_single(*whole, own), "gathering from all, with", rank());
      pending->keep({*whole, own});
    } else {
      for (int owner = 0; owner < world_size(); ++owner) {
        for (const auto& part : parts[owner]) {
          std::vector<at::Tensor> one{part};
          c10d::BroadcastOptions options;
          options.rootRank = owner;
          pending->add(group_->broadcast(one, options), "waiting for", owner);
          pending->keep(one);
        }
      }
    }
    count(parts, traffic_.bytes_sent, traffic_.bytes_received);
    return pending;
  }

  std::unique_ptr<Pending> reduce_scatter(const Parts& parts, int, double divisor) override {
    auto pending = std::make_unique<PendingWorks>(group_);
    if (auto whole = joined(parts)) {
      // Into a tensor of its own: input and output may not overlap.
      at::Tensor sum = at::empty_like(parts[rank()].front());
      pending->add(group_->reduce_scatter_single(sum, *whole), "adding up with all, as", rank());
      pending->keep({*whole, sum});
      pending->then([own = parts[rank()].front(), sum, divisor]() mutable {
        if (divisor != 1) sum.div_(divisor);
        own.copy_(sum);
      });
    } else {
      for (int owner = 0; owner < world_size(); ++owner) {
        for (const auto& part : parts[owner]) {
          std::vector<at::Tensor> one{owner == rank() ? part : part.clone()};
          c10d::ReduceOptions options;
          options.rootRank = owner;
          pending->add(group_->reduce(one, options), "adding up on", owner);
          pending->keep(one);
        }
      }
      if (divisor != 1) {
        pending->then([own = parts[rank()], divisor] {
          for (at::Tensor part : own) part.div_(divisor);
        });
      }
    }
    count(parts, traffic_.bytes_received, traffic_.bytes_sent);
    return pending;
  }

 private:
  // What a ring moves to bring every owner's parts to all, and the other way round to add them up;
  // the backend does not tell what it really did.
  void count(const Parts& parts, int64_t& outward, int64_t& inward) {
    for (int rank = 0; rank < world_size(); ++rank) {
      const int64_t bytes = bytes_of(parts[rank]);
      if (rank == this->rank()) {
        outward += bytes * (world_size() - 1);
      } else {
        inward += bytes;
      }
    }
  }
};

}  // namespace

Exchange::Exchange(ProcessGroupPtr group, int64_t channel)
    : group_(std::move(group)), channel_(channel) {}

int Exchange::message_tag(int tag) const {
  // c10d's tags are non-negative 32 bit numbers; the top one keeps clear of users' small tags.
  constexpr int64_t kOurs = int64_t{1} << 30;
  return static_cast<int>(kOurs | (channel_ & 0x3fff) << 16 | (tag & 0xffff));
}

std::unique_ptr<Pending> Exchange::gather(const std::vector<at::Tensor>& own, const Parts& into,
                                          int to, int tag) {
  auto pending = std::make_unique<PendingWorks>(group_);
  if (rank() != to) {
    traffic_.bytes_sent += send(group_, *pending, own, to, message_tag(tag));
    return pending;
  }
  for (int from = 0; from < world_size(); ++from) {
    if (from == to) continue;
    traffic_.bytes_received += receive(group_, *pending, into[from], from, message_tag(tag));
  }
  return pending;
}

std::unique_ptr<Exchange> make_exchange(ExchangeKind kind, const ProcessGroupPtr& group,
                                        at::Device device, int64_t channel) {
  if (kind == ExchangeKind::kAuto) {
    kind = group->getBackend(device.type())->getBackendName() == "gloo" ? ExchangeKind::kPairwise
                                                                        : ExchangeKind::kNative;
  }
  if (kind == ExchangeKind::kPairwise) return std::make_unique<PairwiseExchange>(group, channel);
  return std::make_unique<NativeExchange>(group, channel);
}

}  // namespace shardstep

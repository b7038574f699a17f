#include "comm/host_sums.h"

#include <ATen/ATen.h>

#include "comm/agreement.h"
#include "comm/gradient_blocks.h"
#include "comm/shared/shared_keys.h"

namespace shardstep::detail {
namespace {

constexpr int64_t kLineBytes = 64, kMarginBytes = 64 << 10;

// The last position up to this one at which a block begins: blocks begin anew with each tensor.
int64_t between_blocks(const std::vector<at::Tensor>& tensors, int64_t position) {
  int64_t offset = 0;
  for (const auto& tensor : tensors) {
    const int64_t within = position - offset;
    if (within < tensor.numel()) return position - within % kBlockElements;
    offset += tensor.numel();
  }
  return position;
}

// Cuts of what one rank owns are made between blocks, so that blocks of 8 bits do not depend on how
// many ranks a host has.
std::vector<Errand> errands_for(const Hosts& hosts, size_t host, const Parts& parts) {
  std::vector<int64_t> numel;
  int64_t element_size = 1;
  for (const auto& part : parts) {
    numel.push_back(numel_of(part));
    if (!part.empty()) element_size = part.front().element_size();
  }
  auto errands =
      errands_of_host(hosts, host, numel, std::max<int64_t>(1, kLineBytes / element_size),
                      kMarginBytes / element_size);
  for (size_t i = 1; i < errands.size(); ++i) {
    auto &before = errands[i - 1], &after = errands[i];
    if (before.owner != after.owner) continue;
    after.begin = std::max(before.begin, between_blocks(parts[after.owner], after.begin));
    before.end = after.begin;
  }
  std::erase_if(errands, [](const Errand& errand) { return errand.size() == 0; });
  return errands;
}

// Any of the parts; undefined if there is none.
at::Tensor first_of(const Parts& parts) {
  for (const auto& part : parts) {
    if (!part.empty()) return part.front();
  }
  return {};
}

}  // namespace

HostSums::HostSums(std::shared_ptr<SharedMemory> shared, ProcessGroupPtr group,
                   std::shared_ptr<ConnectionWatch> watch, std::shared_ptr<MessageCount> messages)
    : group_(std::move(group)),
      watch_(std::move(watch)),
      shared_(std::move(shared)),
      messages_(std::move(messages)),
      on_host_(shared_, SharedKey::kSums) {}

// What each rank of this host sums: first what it speaks for, which others wait for.
Parts HostSums::parts_on_host(const Parts& parts, const std::vector<Errand>& errands) const {
  Parts on_host;
  for (int rank : shared_->group_ranks()) {
    auto& own = on_host.emplace_back();
    for (const auto& errand : errands) {
      if (errand.speaker != rank) continue;
      const auto range = range_of(parts[errand.owner], errand.begin, errand.end);
      own.insert(own.end(), range.begin(), range.end());
    }
    own.insert(own.end(), parts[rank].begin(), parts[rank].end());
  }
  return on_host;
}

// What a host's sum is taken in. That of a single rank is what it has posted.
at::ScalarType HostSums::sum_dtype(size_t host, at::ScalarType posted,
                                   const Setting& setting) const {
  return shared_->hosts().ranks[host].size() == 1 ? posted : setting.dtype.value_or(posted);
}

// A sum that receives what other hosts send.
std::shared_ptr<HostSum> HostSums::begin(const Setting& setting, const Parts& parts,
                                         const std::vector<at::Tensor>& into,
                                         const SumOptions& options) {
  auto sum = std::make_shared<HostSum>();
  sum->tag_ = setting.message_tag;
  sum->options_ = options;
  sum->into_ = into;
  sum->own_numel_ = numel_of(into);
  const auto like = first_of(parts);
  if (like.defined()) receive_sums(*sum, setting, parts, like.scalar_type());
  return sum;
}

void HostSums::expect(const Setting& setting, const Parts& like,
                      const std::vector<at::Tensor>& into, const SumOptions& options) {
  at::NoGradGuard no_grad;
  expected_[setting.message_tag] = begin(setting, like, into, options);
}

std::shared_ptr<HostSum> HostSums::start(const Setting& setting, const Parts& parts,
                                         const std::vector<at::Tensor>& into,
                                         const SumOptions& options) {
  at::NoGradGuard no_grad;
  const auto expected = expected_.extract(setting.message_tag);
  const auto sum = expected ? expected.mapped() : begin(setting, parts, into, options);
  sum->options_ = options;
  const auto like = first_of(parts);
  std::vector<Errand> errands;
  if (like.defined()) errands = errands_for(shared_->hosts(), shared_->host(), parts);
  std::vector<at::Tensor> host_into;
  for (const auto& errand : errands) {
    if (errand.speaker != group_->getRank()) continue;
    const auto dtype = sum_dtype(shared_->host(), like.scalar_type(), setting);
    const auto memory = scratch_->take(errand.size(), like.options().dtype(dtype));
    const auto sums = side_by_side(range_of(parts[errand.owner], errand.begin, errand.end), memory);
    host_into.insert(host_into.end(), sums.begin(), sums.end());
    sum->to_send_.push_back({errand.owner, memory, sums});
  }
  host_into.insert(host_into.end(), into.begin(), into.end());
  sum->on_host_ = on_host_.start(setting.tag, parts_on_host(parts, errands), host_into, {});
  under_way_.push_back(sum);
  progress();
  return sum;
}

// What other hosts add to what this rank owns.
void HostSums::receive_sums(HostSum& sum, const Setting& setting, const Parts& parts,
                            at::ScalarType posted) {
  const auto& hosts = shared_->hosts();
  sum.arriving_ = std::make_shared<PendingWorks>(group_, watch_);
  sum.received_.resize(hosts.count());
  if (sum.own_numel_ == 0) return;
  const auto& wire = sum.options_.rounded_to;
  const bool in_blocks = is_in_blocks(wire);
  const auto memory_options = sum.into_.front().options();
  for (size_t host = 0; host < hosts.count(); ++host) {
    if (host == shared_->host()) continue;
    auto& [sums, memory, messages] = sum.received_[host];
    const auto dtype = in_blocks ? at::kFloat : wire.value_or(sum_dtype(host, posted, setting));
    sums = scratch_->take(sum.own_numel_, memory_options.dtype(dtype));
    memory.push_back(sums);
    for (const auto& errand : errands_for(hosts, host, parts)) {
      if (errand.owner != group_->getRank()) continue;
      auto message = sums.narrow(0, errand.begin, errand.size());
      if (in_blocks) {
        auto into = side_by_side(range_of(sum.into_, errand.begin, errand.end), message);
        const int64_t bytes = bytes_in_blocks(into);
        memory.push_back(scratch_->take(bytes, memory_options.dtype(at::kByte)));
        message = memory.back().narrow(0, 0, bytes);
        messages.push_back({message, std::move(into)});
      }
      messages_->add_received(receive(group_, *sum.arriving_, {message}, errand.speaker, sum.tag_));
    }
  }
}

bool HostSums::attend() {
  const bool more_on_host = on_host_.attend();
  progress();
  return more_on_host || !under_way_.empty();
}

void HostSums::progress() {
  at::NoGradGuard no_grad;
  on_host_.look();
  for (size_t i = 0; i < under_way_.size();) {
    const auto sum = under_way_[i];
    if (!sum->to_send_.empty() && sum->on_host_->left() <= sum->own_numel_) send_spoken(*sum);
    if (!sum->on_host_->done()) {
      ++i;
      continue;
    }
    under_way_.erase(under_way_.begin() + static_cast<std::ptrdiff_t>(i));
    add_later(*sum);
  }
}

void HostSums::send_spoken(HostSum& sum) {
  auto sent = std::make_shared<PendingWorks>(group_, watch_);
  const auto& wire = sum.options_.rounded_to;
  std::vector<at::Tensor> memory;
  for (const auto& [owner, host_memory, sums] : sum.to_send_) {
    const auto whole = host_memory.narrow(0, 0, numel_of(sums));
    const auto message = is_in_blocks(wire) ? to_blocks(sums) : wire ? whole.to(*wire) : whole;
    messages_->add_sent(send(group_, *sent, {message}, owner, sum.tag_));
    memory.push_back(host_memory);
  }
  sum.to_send_.clear();
  // A failure shows where the message is received.
  sending_.run(
      [sent, memory = std::move(memory), scratch = scratch_] {
        sent->wait();
        scratch->give_back(memory);
        return 0.0;
      },
      {sent});
}

// The sum over the hosts, of their sums as they travel. Returns the squares.
double HostSums::add_hosts(const std::vector<HostSum::Received>& received,
                           const std::vector<at::Tensor>& into, SumOptions options) {
  const bool in_blocks = is_in_blocks(options.rounded_to);
  // Without another host nothing has travelled.
  if (in_blocks || received.size() == 1) options.rounded_to.reset();
  for (const auto& host : received) {
    for (const auto& [message, sums] : host.in_blocks) from_blocks(message, sums);
  }
  double squares = 0;
  int64_t offset = 0;
  for (const auto& part : into) {
    if (part.numel() == 0) continue;
    auto own = part;
    if (in_blocks && received.size() > 1) {
      own = at::empty_like(part, at::kFloat);
      through_blocks(part, 0, own);
    }
    std::vector<at::Tensor> terms;
    for (const auto& host : received) {
      terms.push_back(host.sums.defined() ? host.sums.narrow(0, offset, part.numel()) : own);
    }
    squares += sum_in_rank_order(terms, part, options);
    offset += part.numel();
  }
  return squares;
}

void HostSums::add_later(const HostSum& sum) {
  if (!sum.arriving_) {
    sum.total_->done.store(true, std::memory_order_release);
    return;
  }
  adding_.run(
      [arriving = sum.arriving_, received = sum.received_, into = sum.into_, options = sum.options_,
       total = sum.total_, shared = shared_, scratch = scratch_] {
        try {
          arriving->wait();
          total->squares = add_hosts(received, into, options);
          for (const auto& host : received) scratch->give_back(host.memory);
        } catch (...) {
          total->error = std::current_exception();
          shared->give_up(message_of(total->error));
        }
        total->done.store(true, std::memory_order_release);
        shared->mail_bell(shared->rank()).ring();
        return 0.0;
      },
      {sum.arriving_});
}

bool HostSums::is_done(const HostSum& sum) {
  progress();
  return sum.total_->done.load(std::memory_order_acquire);
}

bool HostSums::done_by(const HostSum& sum, std::chrono::steady_clock::time_point end) {
  return on_host_.done_by([&] { return is_done(sum); }, end);
}

void HostSums::finish(const HostSum& sum) {
  on_host_.wait_until(
      [&] { return is_done(sum); },
      [&] { return sum.on_host_->done() ? -1 : on_host_.missing_rank(*sum.on_host_); },
      [&] {
        if (!sum.on_host_->done()) return std::string("the gradients");
        const int rank = sum.arriving_ ? sum.arriving_->awaited_rank() : -1;
        return rank < 0 ? std::string("the gradients of other hosts")
                        : c10::str("the gradients of the host of rank ", rank);
      });
  if (sum.total_->error) std::rethrow_exception(sum.total_->error);
}

}  // namespace shardstep::detail

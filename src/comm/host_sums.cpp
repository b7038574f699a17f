#include "comm/host_sums.h"

#include <ATen/ATen.h>

#include "comm/agreement.h"
#include "comm/shared/shared_keys.h"

namespace shardstep::detail {
namespace {

constexpr int64_t kLineBytes = 64, kMarginBytes = 64 << 10;

std::vector<Errand> errands_for(const Hosts& hosts, size_t host, const std::vector<int64_t>& numel,
                                int64_t element_size) {
  return errands_of_host(hosts, host, numel, std::max<int64_t>(1, kLineBytes / element_size),
                         kMarginBytes / element_size);
}

}  // namespace

HostSums::HostSums(ProcessGroupPtr group, std::shared_ptr<SharedMemory> shared, Traffic& traffic)
    : group_(std::move(group)),
      shared_(std::move(shared)),
      traffic_(traffic),
      on_host_(*shared_, SharedKey::kSums) {}

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

std::shared_ptr<HostSum> HostSums::start(const Parts& parts, MessageTag tag, int message_tag,
                                         const std::vector<at::Tensor>& into,
                                         const SumOptions& options) {
  at::NoGradGuard no_grad;
  auto sum = std::make_shared<HostSum>();
  sum->tag_ = message_tag;
  sum->options_ = options;
  sum->into_ = into;
  sum->own_numel_ = numel_of(into);
  std::vector<int64_t> numel;
  at::Tensor like;
  for (const auto& part : parts) {
    numel.push_back(numel_of(part));
    if (!part.empty()) like = part.front();
  }
  std::vector<Errand> errands;
  if (like.defined()) {
    errands = errands_for(shared_->hosts(), shared_->host(), numel, like.element_size());
    receive_sums(*sum, numel, like);
  }
  std::vector<at::Tensor> host_into;
  for (const auto& errand : errands) {
    if (errand.speaker != group_->getRank()) continue;
    const auto memory = scratch_->take(errand.size(), like.options());
    sum->send_memory_.push_back(memory);
    sum->to_send_.push_back({errand, memory.narrow(0, 0, errand.size())});
    const auto views =
        side_by_side(range_of(parts[errand.owner], errand.begin, errand.end), memory);
    host_into.insert(host_into.end(), views.begin(), views.end());
  }
  host_into.insert(host_into.end(), into.begin(), into.end());
  sum->on_host_ = on_host_.start(parts_on_host(parts, errands), tag, host_into,
                                 {.rounded_to = options.rounded_to});
  under_way_.push_back(sum);
  progress();
  return sum;
}

// What other hosts add to what this rank owns.
void HostSums::receive_sums(HostSum& sum, const std::vector<int64_t>& numel,
                            const at::Tensor& like) {
  const auto& hosts = shared_->hosts();
  sum.arriving_ = std::make_shared<PendingWorks>(group_);
  sum.received_.resize(hosts.count());
  if (sum.own_numel_ == 0) return;
  const auto dtype = sum.options_.rounded_to.value_or(like.scalar_type());
  for (size_t host = 0; host < hosts.count(); ++host) {
    if (host == shared_->host()) continue;
    sum.received_[host] = scratch_->take(sum.own_numel_, like.options().dtype(dtype));
    for (const auto& errand : errands_for(hosts, host, numel, like.element_size())) {
      if (errand.owner != group_->getRank()) continue;
      const auto range = sum.received_[host].narrow(0, errand.begin, errand.size());
      traffic_.bytes_received += receive(group_, *sum.arriving_, {range}, errand.speaker, sum.tag_);
    }
  }
}

bool HostSums::progress() {
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
  return !under_way_.empty();
}

void HostSums::send_spoken(HostSum& sum) {
  auto sent = std::make_shared<PendingWorks>(group_);
  for (const auto& [errand, host_sum] : sum.to_send_) {
    const auto message = sum.options_.rounded_to ? host_sum.to(*sum.options_.rounded_to) : host_sum;
    traffic_.bytes_sent += send(group_, *sent, {message}, errand.owner, sum.tag_);
  }
  sum.to_send_.clear();
  // A failure shows where the message is received.
  sending_.run(
      [sent, memory = std::move(sum.send_memory_), scratch = scratch_] {
        sent->wait();
        scratch->give_back(memory);
        return 0.0;
      },
      {sent});
}

void HostSums::add_later(const HostSum& sum) {
  if (!sum.arriving_) {
    sum.total_->done.store(true, std::memory_order_release);
    return;
  }
  auto options = sum.options_;
  // The host's own sum is rounded as those that are sent.
  if (sum.received_.size() == 1) options.rounded_to.reset();
  adding_.run(
      [arriving = sum.arriving_, received = sum.received_, into = sum.into_, options,
       total = sum.total_, shared = shared_, scratch = scratch_] {
        try {
          arriving->wait();
          int64_t offset = 0;
          for (const auto& part : into) {
            std::vector<at::Tensor> terms;
            for (const auto& host : received) {
              terms.push_back(host.defined() ? host.narrow(0, offset, part.numel()) : part);
            }
            if (part.numel() > 0) total->squares += sum_in_rank_order(terms, part, options);
            offset += part.numel();
          }
          for (const auto& host : received) {
            if (host.defined()) scratch->give_back({host});
          }
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
        return sum.on_host_->done() ? std::string("the gradients of other hosts")
                                    : std::string("the gradients");
      });
  if (sum.total_->error) std::rethrow_exception(sum.total_->error);
}

}  // namespace shardstep::detail

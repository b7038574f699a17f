#include "comm/pending_works.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ScopeExit.h>

#include <cstring>

#include "comm/abandoned_messages.h"
#include "comm/lost_ranks.h"
#include "failure_points.h"
#include "launch/who.h"

namespace shardstep::detail {
namespace {

// Smaller tensors travel together.
constexpr int64_t kOwnMessageBytes = 256 << 10;

bool is_small(int64_t bytes) { return bytes < kOwnMessageBytes; }

// Pieces of a size at which Gloo keeps both directions busy; a single message is a third slower
// (docs/performance.md). None for an empty tensor.
std::vector<at::Tensor> pieces(const at::Tensor& tensor) {
  constexpr int64_t kPieceBytes = 8 << 20;
  if (tensor.numel() == 0) return {};
  return tensor.split(std::max<int64_t>(1, kPieceBytes / tensor.element_size()));
}

struct BySize {
  std::vector<at::Tensor> small, large;  // empty tensors are in neither
};

BySize by_size(const std::vector<at::Tensor>& tensors) {
  BySize sorted;
  for (const auto& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    (is_small(static_cast<int64_t>(tensor.nbytes())) ? sorted.small : sorted.large)
        .push_back(tensor);
  }
  return sorted;
}

// The tensor that they form, if they are side by side in memory; else undefined.
at::Tensor joined_in_place(const std::vector<at::Tensor>& tensors) {
  int64_t numel = 0;
  const auto& first = tensors.front();
  for (const auto& tensor : tensors) {
    if (!tensor.storage().is_alias_of(first.storage()) || tensor.dtype() != first.dtype() ||
        tensor.storage_offset() != first.storage_offset() + numel) {
      return {};
    }
    numel += tensor.numel();
  }
  return first.as_strided({numel}, {1}, first.storage_offset());
}

at::Tensor room_for(const std::vector<at::Tensor>& tensors) {
  return at::empty({bytes_of(tensors)}, tensors.front().options().dtype(at::kByte));
}

// Calls copy(tensor, offset of its bytes where they are side by side).
template <class Copy>
void for_each_packed(const std::vector<at::Tensor>& tensors, Copy copy) {
  int64_t offset = 0;
  for (const auto& tensor : tensors) {
    copy(tensor, offset);
    offset += static_cast<int64_t>(tensor.nbytes());
  }
}

// A view of a tensor would take longer than copying a small one.
at::Tensor pack(const std::vector<at::Tensor>& tensors) {
  auto packed = room_for(tensors);
  auto* const memory = static_cast<std::byte*>(packed.mutable_data_ptr());
  for_each_packed(tensors, [&](const at::Tensor& tensor, int64_t offset) {
    if (packed.is_cpu()) {
      std::memcpy(memory + offset, tensor.const_data_ptr(), tensor.nbytes());
    } else {
      packed.narrow(0, offset, static_cast<int64_t>(tensor.nbytes())).copy_(tensor.view(at::kByte));
    }
  });
  return packed;
}

void unpack(const std::vector<at::Tensor>& tensors, const at::Tensor& packed) {
  const auto* const memory = static_cast<const std::byte*>(packed.const_data_ptr());
  for_each_packed(tensors, [&](const at::Tensor& tensor, int64_t offset) {
    if (packed.is_cpu()) {
      std::memcpy(tensor.mutable_data_ptr(), memory + offset, tensor.nbytes());
    } else {
      tensor.view(at::kByte).copy_(packed.narrow(0, offset, static_cast<int64_t>(tensor.nbytes())));
    }
  });
}

// The stream that waits need not be the one that the tensors were made on; their memory must not be
// used again before it is done with them.
void record_current_streams(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    if (tensor.is_cpu()) continue;
    const c10::impl::VirtualGuardImpl device(tensor.device().type());
    tensor.record_stream(device.getStream(tensor.device()));
  }
}

// Calls `call`, and adds what it was for to an error of the transport, and whom that has lost.
template <class Call, class Group>
auto with_context(const char* verb, int peer, const std::string& who, const Group& group,
                  const Call& call) {
  const auto context = [&] {
    const auto whom = peer == kAllRanks ? std::string(" all ranks") : c10::str(" rank ", peer);
    return c10::str("shardstep: while ", verb, whom, lost_ranks(group()), who);
  };
  try {
    return call();
  } catch (c10::Error& error) {
    error.add_context(context());
    throw;
  } catch (const std::exception& error) {
    throw std::runtime_error(c10::str(error.what(), "\n", context()));
  }
}

}  // namespace

// Another rank may have begun to send, or to receive, what was not waited for. Collectives look
// after themselves.
PendingWorks::~PendingWorks() {
  if (!watch_ || works_.empty()) return;
  AbandonedMessages messages{group_, {}, std::move(kept_)};
  for (auto& item : works_) messages.works.push_back(std::move(item.work));
  keep_abandoned(std::move(messages));
}

void PendingWorks::wait() {
  SHARDSTEP_FAILURE_POINT("messages: waits");
  if (watch_) watch_->watch(*this);
  const auto unwatch = c10::make_scope_exit([this] {
    if (watch_) watch_->unwatch(*this);
  });
  for (auto& [work, verb, peer, arrived, receives] : works_) {
    receives_ = receives;
    awaited_rank_ = peer;
    const auto group = [this] { return group_.lock(); };
    with_context(verb, peer, who(rank_, world_size_), group, [this, &work = work] {
      wait_for(*work);
      return true;
    });
    if (arrived) arrived();
    ++arrived_;
  }
  awaited_rank_ = -1;
  {
    const std::lock_guard lock(mutex_);
    works_.clear();
  }
  record_current_streams(kept_);
  for (const auto& finish : finish_) finish();
}

void PendingWorks::wait_for(c10d::Work& work) {
  if (end_ == End::kNone) watch_ ? void(work.wait()) : wait_for_collective(work, group_.lock());
  TORCH_CHECK(end_ != End::kAborted, "shardstep: the exchange was destroyed");
  TORCH_CHECK(end_ != End::kLost, "shardstep: lost a rank in the middle of an exchange");
}

void PendingWorks::end_wait(End why) {
  const std::lock_guard lock(mutex_);
  end_ = why;
  for (auto& item : works_) item.work->abort();
}

int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

int64_t numel_of(const std::vector<at::Tensor>& tensors) {
  int64_t numel = 0;
  for (const auto& tensor : tensors) numel += tensor.numel();
  return numel;
}

std::vector<at::Tensor> side_by_side(const std::vector<at::Tensor>& parts,
                                     const at::Tensor& memory) {
  std::vector<at::Tensor> views;
  int64_t offset = 0;
  for (const auto& part : parts) {
    views.push_back(memory.narrow(0, offset, part.numel()));
    offset += part.numel();
  }
  return views;
}

std::vector<at::Tensor> side_by_side_for_messages(const std::vector<at::Tensor>& parts,
                                                  const at::Tensor& memory) {
  std::vector<at::Tensor> views(parts.size());
  int64_t offset = 0;
  for (const bool small : {true, false}) {
    for (size_t i = 0; i < parts.size(); ++i) {
      const int64_t numel = parts[i].numel();
      if (is_small(numel * static_cast<int64_t>(memory.element_size())) != small) continue;
      views[i] = memory.narrow(0, offset, numel);
      offset += numel;
    }
  }
  return views;
}

std::vector<at::Tensor> as_messages(const std::vector<at::Tensor>& tensors) {
  at::NoGradGuard no_grad;
  auto [small, messages] = by_size(tensors);
  if (small.empty()) return messages;
  const auto joined = joined_in_place(small);
  messages.insert(messages.begin(), joined.defined() ? joined : pack(small));
  return messages;
}

Sent send(const ProcessGroupPtr& group, PendingWorks& pending,
          const std::vector<at::Tensor>& tensors, int to, int tag) {
  return send_messages(group, pending, as_messages(tensors), to, tag);
}

Sent send_messages(const ProcessGroupPtr& group, PendingWorks& pending,
                   const std::vector<at::Tensor>& messages, int to, int tag) {
  Sent sent{.bytes = bytes_of(messages)};
  for (const auto& message : messages) {
    for (const auto& piece : pieces(message)) {
      ++sent.messages;
      std::vector<at::Tensor> one{piece};
      // Also fails here, if the connection is already closed.
      pending.add(with_context(
                      "sending to", to, who(group), [&] { return group; },
                      [&] { return group->send(one, to, tag); }),
                  "sending to", to);
    }
  }
  pending.keep(messages);
  return sent;
}

int64_t receive(const ProcessGroupPtr& group, PendingWorks& pending,
                const std::vector<at::Tensor>& tensors, int from, int tag) {
  at::NoGradGuard no_grad;
  const auto start = [&](const at::Tensor& tensor, std::function<void()> arrived) {
    const auto split = pieces(tensor);
    for (size_t i = 0; i < split.size(); ++i) {
      std::vector<at::Tensor> one{split[i]};
      pending.add(with_context(
                      "waiting for", from, who(group), [&] { return group; },
                      [&] { return group->recv(one, from, tag); }),
                  "waiting for", from, i + 1 == split.size() ? std::move(arrived) : nullptr,
                  /*receives=*/true);
    }
  };
  const auto [small, large] = by_size(tensors);
  if (!small.empty()) {
    const auto joined = joined_in_place(small);
    const auto packed = joined.defined() ? joined : room_for(small);
    start(
        packed, joined.defined() ? std::function<void()>()
                                 : [small = small, packed] { unpack(small, packed); });
    pending.keep({packed});
  }
  for (const auto& tensor : large) start(tensor, {});
  pending.keep(tensors);
  return bytes_of(tensors);
}

}  // namespace shardstep::detail

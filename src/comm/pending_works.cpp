#include "comm/pending_works.h"

#include "launch/who.h"

namespace shardstep::detail {
namespace {

// Pieces of a size at which Gloo keeps both directions busy; one message of everything is a third
// slower (docs/performance.md). Nothing for a tensor that holds nothing.
std::vector<at::Tensor> pieces(const at::Tensor& tensor) {
  constexpr int64_t kPieceBytes = 8 << 20;
  if (tensor.numel() == 0) return {};
  return tensor.split(std::max<int64_t>(1, kPieceBytes / tensor.element_size()));
}

}  // namespace

void PendingWorks::wait() {
  for (auto& [work, verb, peer] : works_) {
    const auto context =
        c10::str("shardstep: while ", verb, " rank ", peer, who(rank_, world_size_));
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

int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

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

}  // namespace shardstep::detail

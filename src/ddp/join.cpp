#include "shardstep/join.h"

#include <ATen/ATen.h>

#include <exception>
#include <utility>

#include "comm/collectives.h"
#include "failure_points.h"
#include "launch/who.h"

namespace shardstep {
namespace {

// As in torch.
constexpr int64_t kSkewToWarnOf = 1000;

// What an announcement does, in errors.
constexpr const char* kVerb = "in a Join, comparing inputs with";

using detail::who;

// One number per joinable, how many ranks announce it, and one more, how many ranks want to stop.
at::Tensor empty_message(int64_t count) { return at::zeros({count + 1}, at::kLong); }

// An announcement under way. Its result is the number of ranks that made it.
class Announcement : public c10d::Work {
 public:
  Announcement(ProcessGroupPtr group, c10::intrusive_ptr<c10d::Work> work, at::Tensor message,
               int64_t index)
      : group_(std::move(group)),
        work_(std::move(work)),
        message_(std::move(message)),
        index_(index) {}
  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  void synchronize() override { work_->synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override {
    if (timeout != kNoTimeout) return work_->wait(timeout);
    detail::wait_for_all_ranks(group_, work_, kVerb);
    return true;
  }
  std::vector<at::Tensor> result() override { return {message_.narrow(0, index_, 1)}; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return work_->getFuture()->then(
        [result = result()](c10::ivalue::Future& future) -> c10::IValue {
          future.value();  // throws if it failed
          return result;
        },
        c10::ListType::ofTensors());
  }

 private:
  ProcessGroupPtr group_;
  c10::intrusive_ptr<c10d::Work> work_;
  at::Tensor message_;
  int64_t index_;
};

}  // namespace

Join::Join(Joinables joinables, const JoinOptions& options)
    : joinables_(std::move(joinables)),
      options_(options),
      exceptions_at_start_(std::uncaught_exceptions()) {
  TORCH_CHECK_VALUE(!joinables_.empty(), "shardstep: expected at least one joinable, got none");
  const auto& first = joinables_.front().get();
  const auto group = first.join_process_group();
  for (size_t i = 0; i < joinables_.size(); ++i) {
    const Joinable& joinable = joinables_[i];
    TORCH_CHECK_VALUE(joinable.join_process_group() == group,
                      "shardstep: expected joinables of one process group, got a different one for "
                      "joinable ",
                      i, who(group));
    TORCH_CHECK_VALUE(joinable.join_device() == first.join_device(),
                      "shardstep: expected joinables on one device, got ", first.join_device(),
                      " for joinable 0 and ", joinable.join_device(), " for joinable ", i,
                      who(group));
    TORCH_CHECK_VALUE(!joinable.join_place_, "shardstep: expected joinables that are in no other ",
                      "Join, got one that is in one as joinable ", i, who(group));
  }
  if (!options_.enable()) return;
  for (Joinable& joinable : joinables_) hooks_.push_back(joinable.join_hook(options_));
  open_ = true;
  const auto count = static_cast<int64_t>(joinables_.size());
  for (int64_t i = 0; i < count; ++i) {
    joinables_[i].get().join_place_ =
        Joinable::Place{i, count, options_.throw_on_early_termination()};
  }
  for (int64_t i = 0; i < count; ++i) {
    if (joinables_[i].get().join_place_->index == i) continue;
    leave();
    TORCH_CHECK_VALUE(false, "shardstep: expected each joinable once, got joinable ", i, " again",
                      who(group));
  }
}

Join::~Join() {
  const bool forgotten = open_ && std::uncaught_exceptions() == exceptions_at_start_;
  leave();
  if (!forgotten) return;
  try {
    TORCH_WARN("shardstep: a Join ended without finish(); ranks with more inputs will wait");
  } catch (...) {
  }
}

// From here on the joinables of this rank announce nothing.
void Join::leave() {
  if (!std::exchange(open_, false)) return;
  for (Joinable& joinable : joinables_) joinable.join_place_.reset();
}

void Join::finish() {
  if (!options_.enable()) return;
  const auto group = joinables_.front().get().join_process_group();
  TORCH_CHECK(open_, "shardstep: expected one call of Join::finish, got a second", who(group));
  leave();
  std::vector<int64_t> shadowed(hooks_.size(), 0);
  bool is_last_joiner = true;
  for (;;) {
    const auto message = exchange_message();
    const auto* ranks = message.const_data_ptr<int64_t>();
    std::optional<size_t> announced;
    for (size_t i = 0; i < hooks_.size(); ++i) {
      if (ranks[i] == 0) continue;
      TORCH_CHECK(!announced,
                  "shardstep: expected all ranks to use their joinables in the same order, "
                  "got joinable ",
                  *announced, " on some and ", i, " on others", who(group));
      announced = i;
    }
    if (!announced) break;
    TORCH_CHECK(!options_.throw_on_early_termination(),
                "shardstep: this rank has no more inputs, but other ranks have", who(group));
    SHARDSTEP_FAILURE_POINT("join: heard");
    hooks_[*announced]->main_hook();
    is_last_joiner = false;
    warn_of_skew(++shadowed[*announced]);
  }
  for (auto& hook : hooks_) hook->post_hook(is_last_joiner);
}

// A joined rank's answer to an announcement; returns what ranks announced.
at::Tensor Join::exchange_message() {
  const Joinable& first = joinables_.front();
  auto message = empty_message(static_cast<int64_t>(hooks_.size()));
  if (options_.throw_on_early_termination()) message[-1] = 1;
  std::vector<at::Tensor> tensors{message.to(first.join_device())};
  const auto group = first.join_process_group();
  detail::wait_for_all_ranks(group, group->allreduce(tensors), kVerb);
  return tensors[0].cpu();
}

void Join::warn_of_skew(int64_t shadowed) {
  if (shadowed != kSkewToWarnOf + 1) return;
  const auto group = joinables_.front().get().join_process_group();
  TORCH_WARN("shardstep: uneven inputs: this rank has over ", kSkewToWarnOf,
             " inputs fewer than others and idles while they train", who(group));
}

c10::intrusive_ptr<c10d::Work> Join::notify_join_context(Joinable& joinable) {
  if (!joinable.join_place_) return {};
  const auto place = *joinable.join_place_;
  const auto group = joinable.join_process_group();
  auto message = empty_message(place.count);
  message[place.index] = 1;
  std::vector<at::Tensor> tensors{message.to(joinable.join_device())};
  const auto work = group->allreduce(tensors);
  SHARDSTEP_FAILURE_POINT("join: announced");
  if (place.throw_on_early_termination) {
    detail::wait_for_all_ranks(group, work, kVerb);
    const auto ended = tensors[0][-1].item<int64_t>();
    TORCH_CHECK(ended == 0, "shardstep: ", ended, " of ", group->getSize(),
                " ranks have no more inputs, and throw_on_early_termination is set", who(group));
  }
  return c10::make_intrusive<Announcement>(group, work, tensors[0], place.index);
}

}  // namespace shardstep

// What a save promises: a snapshot of the moment of the call, failures that are reported, one
// writer at a time, and undisturbed readers.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <future>
#include <thread>

#include "shardstep/checkpoint.h"
#include "support/folder.h"
#include "support/torch.h"
#include "support/zero_support.h"

namespace shardstep::test {
namespace {

using torch::optim::AdamWOptions;

constexpr auto kPatience = std::chrono::seconds(30);

ZeroOptions by_element(const ProcessGroupPtr& group) {
  return ZeroOptions().process_group(group).sharding(Sharding::kElement);
}

// Holds up a background save until it is opened.
class Gate {
 public:
  CheckpointOptions options() {
    return CheckpointOptions().asynchronous(true).progress([this](CheckpointProgress) {
      TORCH_CHECK(opened_.wait_for(kPatience) == std::future_status::ready, "nobody opened");
    });
  }
  void open() { promise_.set_value(); }

 private:
  std::promise<void> promise_;
  std::shared_future<void> opened_{promise_.get_future()};
};

CheckpointOptions failing() {
  return CheckpointOptions().asynchronous(true).progress(
      [](CheckpointProgress) { TORCH_CHECK(false, "no space left"); });
}

TEST(CheckpointSaving, AChildOfForkLeavesTheBackgroundToItsParent) {
  const Folder folder;
  run_ranks(1, [&](const ProcessGroupPtr& group) {
    auto params = make_params();
    auto zero =
        std::make_unique<ZeroRedundancyOptimizer>(params, AdamWOptions(0.01), by_element(group));
    train(params, *zero, 0, 1);
    Gate gate;
    zero->save_checkpoint(folder / "c", gate.options());
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);
      zero.reset();
      ::_exit(0);
    }
    int status = -1;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    gate.open();
    zero->wait_checkpoint();
    EXPECT_NO_THROW(Checkpoint(folder / "c").verify());
  });
}

TEST(CheckpointSaving, TheBackgroundWritesWhereTheCallMeant) {
  const Folder folder;
  const auto before = std::filesystem::current_path();
  run_ranks(1, [&](const ProcessGroupPtr& group) {
    auto params = make_params();
    ZeroRedundancyOptimizer zero(params, AdamWOptions(0.01), by_element(group));
    train(params, zero, 0, 1);
    std::filesystem::create_directories(folder / "a");
    std::filesystem::create_directories(folder / "b/c");
    std::filesystem::current_path(folder / "a");
    Gate gate;
    zero.save_checkpoint("c", gate.options());
    std::filesystem::current_path(folder / "b");
    gate.open();
    zero.wait_checkpoint();
    EXPECT_NO_THROW(Checkpoint(folder / "a/c").verify());
    EXPECT_TRUE(std::filesystem::is_empty(folder / "b/c"));
  });
  std::filesystem::current_path(before);
}

TEST(CheckpointSaving, TheBackgroundHasTheExtraOfTheCall) {
  const Folder folder;
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    auto params = make_params();
    ZeroRedundancyOptimizer zero(params, AdamWOptions(0.01), by_element(group));
    train(params, zero, 0, 1);
    auto mean = torch::ones({3});
    c10::impl::GenericDict inner(c10::StringType::get(), c10::AnyType::get());
    inner.insert("deep", mean);
    NamedValues extra;
    extra.insert("mean", mean);
    extra.insert("inner", inner);
    Gate gate;
    zero.save_checkpoint(folder / "c", gate.options().extra(extra));
    mean.fill_(7);
    gate.open();
    zero.wait_checkpoint();
    const auto found = zero.load_checkpoint(folder / "c");
    EXPECT_TRUE(at::equal(found["mean"].toTensor(), torch::ones({3})));
    const auto deep = found["inner"].toGenericDict().at("deep").toTensor();
    EXPECT_TRUE(at::equal(deep, torch::ones({3})));
  });
}

TEST(CheckpointSaving, AFailureThatNoCallReportedIsAWarning) {
  const Folder folder;
  ::testing::internal::CaptureStderr();
  run_ranks(1, [&](const ProcessGroupPtr& group) {
    auto params = make_params();
    ZeroRedundancyOptimizer zero(params, AdamWOptions(0.01), by_element(group));
    train(params, zero, 0, 1);
    zero.save_checkpoint(folder / "c", failing());
  });
  const auto said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("the checkpoint in " + (folder / "c") + " was not saved"), std::string::npos)
      << said;
  EXPECT_NE(said.find("no space left (rank 0 of 1)"), std::string::npos) << said;
}

TEST(CheckpointSaving, AFailureIsSaidByTheNextCallAndOnce) {
  const Folder folder;
  ::testing::internal::CaptureStderr();
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    auto params = make_params();
    ZeroRedundancyOptimizer zero(params, AdamWOptions(0.01), by_element(group));
    train(params, zero, 0, 1);
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { zero.save_checkpoint(folder / "c"); },
             [&] { zero.load_checkpoint(folder / "c"); }, [&] { zero.wait_checkpoint(); }}) {
      zero.save_checkpoint(folder / "c", failing());
      const auto message = error_of<c10::Error>(call);
      EXPECT_NE(message.find("no space left"), std::string::npos) << message;
    }
    zero.wait_checkpoint();
  });
  EXPECT_EQ(::testing::internal::GetCapturedStderr().find("was not saved"), std::string::npos);
}

TEST(CheckpointSaving, RankZeroSaysWhomItDidNotWaitFor) {
  const Folder folder;
  Gate gate;
  std::promise<void> left;
  ::testing::internal::CaptureStderr();
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    auto params = make_params();
    auto zero =
        std::make_unique<ZeroRedundancyOptimizer>(params, AdamWOptions(0.01), by_element(group));
    train(params, *zero, 0, 1);
    auto options = group->getRank() == 1 ? gate.options() : CheckpointOptions().asynchronous(true);
    zero->save_checkpoint(folder / "c", options.timeout(std::chrono::milliseconds(100)));
    if (group->getRank() == 0) {
      zero = nullptr;
      left.set_value();
    } else {
      ASSERT_EQ(left.get_future().wait_for(kPatience), std::future_status::ready);
      gate.open();
      zero = nullptr;
    }
  });
  const auto said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("waited too long for the shard"), std::string::npos) << said;
  EXPECT_NE(said.find("of rank 1"), std::string::npos) << said;
}

CheckpointIndex small_index() {
  CheckpointIndex index;
  index.parameters.push_back({.name = "w", .shape = std::vector<int64_t>{4}, .dtype = at::kFloat});
  index.param_groups.emplace_back().params = {0};
  index.state[0] = {"sum"};
  index.tensors["state.0.sum"] = {.dtype = at::kFloat, .shape = {4}, .order = {}, .parts = {}};
  return index;
}

// All elements of one checkpoint have the same value.
void write_generation(const std::string& directory, double value) {
  auto index = small_index();
  index.extra = c10::IValue(value);
  CheckpointWriter writer(directory, index);
  writer.write("state.0.sum", torch::full({4}, value));
  writer.commit();
}

TEST(CheckpointSaving, OneWriterAtATime) {
  const Folder folder;
  const auto owner = c10::str("got process ", ::getpid(), " on ");
  {
    const CheckpointWriter first(folder / "c", small_index());
    const auto message =
        error_of<c10::Error>([&] { CheckpointWriter(folder / "c", small_index()); });
    EXPECT_NE(message.find("expected no other writer of " + (folder / "c")), std::string::npos);
    EXPECT_NE(message.find(owner), std::string::npos) << message;
    EXPECT_NE(message.find(" since 20"), std::string::npos) << message;
  }
  write_generation(folder / "c", 1);
  EXPECT_EQ(names_in(folder / "c").size(), 2u);
  // The optimizers of one group have one lock, and hold it until the checkpoint is complete.
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    auto params = make_params();
    ZeroRedundancyOptimizer one(params, AdamWOptions(0.01), by_element(group));
    ZeroRedundancyOptimizer other(params, AdamWOptions(0.01), by_element(group));
    train(params, one, 0, 1);
    train(params, other, 0, 1);
    Gate gate;
    one.save_checkpoint(folder / "c", gate.options());
    const auto message = error_of<c10::Error>([&] { other.save_checkpoint(folder / "c"); });
    EXPECT_NE(message.find(owner), std::string::npos) << message;
    EXPECT_NE(message.find("(rank 0 of 2)"), std::string::npos) << message;
    EXPECT_EQ(read_checkpoint(folder / "c").state.size(), 1u);
    other.save_checkpoint(folder / "elsewhere");
    group->barrier()->wait();
    gate.open();
    one.wait_checkpoint();
    other.save_checkpoint(folder / "c");
    Checkpoint(folder / "c").verify();
  });
}

TEST(CheckpointSaving, AReaderKeepsWhatItReads) {
  const Folder folder;
  write_generation(folder / "c", 1);
  {
    Checkpoint old(folder / "c");
    write_generation(folder / "c", 2);
    write_generation(folder / "c", 3);
    EXPECT_TRUE(at::equal(old.read("state.0.sum"), torch::full({4}, 1.0)));
    old.verify();
    // The second generation had no reader.
    EXPECT_EQ(names_in(folder / "c").size(), 4u);
  }
  write_generation(folder / "c", 4);
  EXPECT_EQ(names_in(folder / "c").size(), 2u);
}

TEST(CheckpointSaving, AReaderGetsTheOldOrTheNew) {
  const Folder folder;
  write_generation(folder / "c", 0);
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (int generation = 1; !stop; ++generation) write_generation(folder / "c", generation);
  });
  for (int round = 0; round < 100; ++round) {
    try {
      Checkpoint checkpoint(folder / "c");
      checkpoint.verify();
      EXPECT_TRUE(at::equal(checkpoint.read("state.0.sum"),
                            torch::full({4}, checkpoint.index().extra.toDouble())));
    } catch (const c10::Error& error) {
      ADD_FAILURE() << error.what_without_backtrace();
    }
  }
  stop = true;
  writer.join();
}

TEST(CheckpointSaving, RanksLoadOneCheckpointWhileItIsReplaced) {
  const Folder folder;
  auto generation = [&](double value) {
    auto index = small_index();
    index.param_groups[0].options =
        local_optimizer(AdamWOptions(value)).read_options(AdamWOptions(value));
    index.state[0] = {"step", "exp_avg", "exp_avg_sq"};
    index.tensors.clear();
    for (const auto* key : {"exp_avg", "exp_avg_sq"}) {
      index.tensors[state_name(0, key)] = {
          .dtype = at::kFloat, .shape = {4}, .order = {}, .parts = {}};
    }
    index.tensors["state.0.step"] = {.dtype = at::kFloat, .shape = {}, .order = {}, .parts = {}};
    CheckpointWriter writer(folder / "c", index);
    for (const auto& [name, tensor] : index.tensors) {
      writer.write(name, torch::full(tensor.shape, value));
    }
    writer.commit();
  };
  generation(1);
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (int next = 2; !stop; ++next) generation(next);
  });
  run_ranks(2, [&](const ProcessGroupPtr& group) {
    std::vector<at::Tensor> params{torch::zeros({4}, torch::requires_grad())};
    ZeroRedundancyOptimizer zero(params, AdamWOptions(0.5), by_element(group));
    for (int round = 0; round < 20; ++round) zero.load_checkpoint(folder / "c");
  });
  stop = true;
  writer.join();
}

}  // namespace
}  // namespace shardstep::test

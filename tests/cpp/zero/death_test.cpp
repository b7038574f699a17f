// Kills a rank at each named step of the library (src/failure_points.h): the other ranks raise
// soon, and a new run in the same directory goes on from the last checkpoint to the same
// parameters. Also ranks that stop, and that leave by an exception.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <thread>

#include "failure_points.h"
#include "shardstep/shardstep.h"
#include "shardstep/zero_hooks.h"
#include "support/folder.h"
#include "support/forked_ranks.h"
#include "support/full_run.h"
#include "support/torch.h"
#include "support/zero_support.h"

namespace shardstep {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr int kDyingRanks = 3;
constexpr int kTrainedSteps = 4;
constexpr auto kLongTimeout = std::chrono::seconds(60);
// Within which they raise when a rank has stopped, after the timeout.
constexpr auto kPromisedAfterTimeout = std::chrono::seconds(30);

struct DyingNetImpl : torch::nn::Module {
  DyingNetImpl()
      : first(register_module("first", torch::nn::Linear(6, 40))),
        last(register_module("last", torch::nn::Linear(40, 5))),
        mean(register_buffer("mean", torch::zeros({6}))) {
    at::NoGradGuard no_grad;
    const auto random = test::generator(7);
    for (auto& param : parameters()) param.copy_(torch::randn(param.sizes(), random) / 4);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto output = last(first(x - mean).tanh());
    mean.lerp_(x.mean(0), 0.1);  // of this rank's inputs, until rank 0's is sent
    return output;
  }
  torch::nn::Linear first, last;
  at::Tensor mean;
};
TORCH_MODULE(DyingNet);

// How a training reaches the library's steps.
enum class Training { kStage2, kOverlapForward, kHooks, kJoin };

struct Way {
  Training training;
  ExchangeKind exchange;
};

const std::vector<Way>& all_trainings() {
  static const std::vector<Way> ways = [] {
    std::vector<Way> all;
    for (auto exchange : {ExchangeKind::kSharedMemory, ExchangeKind::kPairwise,
                          ExchangeKind::kNative, ExchangeKind::kHierarchical}) {
      for (auto training : {Training::kStage2, Training::kOverlapForward, Training::kHooks}) {
        all.push_back({training, exchange});
      }
    }
    all.push_back({Training::kJoin, ExchangeKind::kPairwise});
    return all;
  }();
  return ways;
}

std::string name_of(const Way& way) {
  static const std::map<Training, std::string> trainings{{Training::kStage2, "stage 2"},
                                                         {Training::kOverlapForward, "overlap"},
                                                         {Training::kHooks, "hooks"},
                                                         {Training::kJoin, "join"}};
  static const std::map<ExchangeKind, std::string> exchanges{
      {ExchangeKind::kSharedMemory, "shared memory"},
      {ExchangeKind::kPairwise, "pairwise"},
      {ExchangeKind::kNative, "native"},
      {ExchangeKind::kHierarchical, "hierarchical"}};
  return trainings.at(way.training) + ", " + exchanges.at(way.exchange);
}

at::Tensor batch_of(int rank, int step) {
  return torch::randn({4, 6}, test::generator(100 + 10 * step + rank));
}

// By rank: the step at which its last run began, and the step of its last save that is on the disk
// for certain, because it has returned.
struct Progress {
  std::array<std::atomic<int>, kDyingRanks> began, saved;

  int last_saved() const { return *std::max_element(saved.begin(), saved.end()); }
};

// Where a run trains, and the one that goes on from it.
struct Place {
  test::Folder folder;
  std::string directory = folder / "checkpoint";
  test::Shared<Progress> progress;
};

// Goes on from the directory's checkpoint, if there is one. Every other save is in the background.
class TrainingRun {
 public:
  TrainingRun(const Way& way, const ProcessGroupPtr& group, const Place& place)
      : way_(way), group_(group), directory_(place.directory), progress_(*place.progress) {
    auto options = ZeroOptions().process_group(group).exchange(way.exchange).bucket_cap_mb(0.001);
    options.sharding(Sharding::kElement);
    if (way.training == Training::kHooks) {
      ddp_ = std::make_unique<DistributedDataParallel<DyingNet>>(
          net_, DistributedDataParallelOptions().process_group(group).bucket_cap_mb(0.0005));
      options.overlap_with_ddp(true);
    } else {
      options.stage(2).module(net_.ptr());
      options.overlap_forward(way.training == Training::kOverlapForward);
    }
    zero_ = std::make_unique<ZeroRedundancyOptimizer>(net_->parameters(),
                                                      torch::optim::AdamWOptions(0.01), options);
    if (ddp_) {
      ddp_->register_comm_hook(
          hook_with_zero_step_interleaved(reduce_to_owners_hook(*ddp_, *zero_), *ddp_, *zero_));
    }
  }

  void train(int steps, const std::function<void(int step)>& before_step = nullptr) {
    int step = 0;
    if (fs::exists(directory_ + "/index.json")) {
      step = static_cast<int>(
          zero_->load_checkpoint(directory_, checkpoint_options(0))["step"].toInt());
    }
    progress_.began[group_->getRank()] = step;
    for (; step < steps; ++step) {
      if (before_step) before_step(step);
      make_step(step);
      if (step == 1) zero_->consolidate_state_dict(0);
      zero_->save_checkpoint(directory_, checkpoint_options(step + 1));
      if (!in_background(step + 1)) note_saved(step + 1);
    }
    zero_->wait_checkpoint();
    note_saved(steps);
  }

  // Of all parameters' bits, and of the buffer's that every rank has from rank 0.
  std::string digest() {
    zero_->wait();
    uint64_t hash = 0xcbf29ce484222325u;
    auto tensors = net_->parameters();
    if (!ddp_) tensors.push_back(net_->mean);  // DDP sends it before the next forward
    for (const auto& param : tensors) {
      const auto flat = param.detach().contiguous();
      const auto* bytes = static_cast<const uint8_t*>(flat.const_data_ptr());
      for (size_t i = 0; i < flat.nbytes(); ++i) hash = (hash ^ bytes[i]) * 0x100000001b3u;
    }
    return std::to_string(hash);
  }

 private:
  static bool in_background(int step) { return step % 2 == 0; }
  void note_saved(int step) { progress_.saved[group_->getRank()] = step; }

  CheckpointOptions checkpoint_options(int step) {
    NamedValues extra;
    extra.insert("step", int64_t{step});
    return CheckpointOptions()
        .module(net_.ptr())
        .extra(extra)
        .rng(false)
        .asynchronous(in_background(step))
        .timeout(std::chrono::seconds(5));
  }

  void make_step(int step) {
    const auto input = batch_of(group_->getRank(), step);
    if (ddp_) {
      ddp_->zero_grad();
      ddp_->forward(input).square().mean().backward();
      zero_->wait();
      return;
    }
    if (way_.training != Training::kJoin) return update(input);
    // The last rank has joined while the others make their second update.
    Join join({*zero_});
    update(input);
    if (group_->getRank() < kDyingRanks - 1) update(2 * input);
    join.finish();
  }

  void update(const at::Tensor& input) {
    zero_->wait();
    zero_->zero_grad();
    net_(input).square().mean().backward();
    // After a Join, the last bit of the norm may differ from that in a new process.
    if (way_.training != Training::kJoin) zero_->clip_grad_norm_(1.0);
    zero_->step();
  }

  Way way_;
  ProcessGroupPtr group_;
  std::string directory_;
  Progress& progress_;
  DyingNet net_;
  std::unique_ptr<DistributedDataParallel<DyingNet>> ddp_;
  std::unique_ptr<ZeroRedundancyOptimizer> zero_;
};

// What ranks know of the accident.
struct Accident {
  std::atomic<int> connected;         // ranks; before all are, a death is Gloo's to notice
  std::atomic<int> left;              // it happens when the point was reached this many times more
  std::atomic<Clock::duration> when;  // it happened
};

// What this process does at a point. Calls may come from any thread.
struct AtPoints {
  std::string name;
  Accident* accident = nullptr;
  int signal = SIGKILL;
  std::mutex mutex;
  std::map<std::string, int> reached;
};
AtPoints at_points;

void on_point(const char* name) {
  if (at_points.name.empty()) {
    const std::lock_guard lock(at_points.mutex);
    ++at_points.reached[name];
  } else if (at_points.name == name && --at_points.accident->left == 0) {
    at_points.accident->when = Clock::now().time_since_epoch();
    ::kill(::getpid(), at_points.signal);
  }
}

constexpr int kNobody = -1;
// The rank that reaches the point as number `occurrence` of all ranks.
constexpr int kWhoever = -2;

struct Failing {
  int rank = kNobody;
  std::string point;
  int occurrence = 1;
  int signal = SIGKILL;

  bool may_be(int other) const { return rank == other || rank == kWhoever; }
};

// What became of one rank.
struct Fate {
  int status = 0;
  Clock::time_point ended;
  Clock::duration after_accident;  // ended, where one rank failed
  std::string outcome;             // "done <digest>" or "error <message>"
  std::map<std::string, int> reached;
};

struct RankFiles {
  std::string outcome, reached;
  RankFiles(const test::Folder& folder, int rank)
      : outcome(folder / c10::str("outcome-", rank)), reached(folder / c10::str("points-", rank)) {}
};

std::string text_of(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

using Body = std::function<std::string(const ProcessGroupPtr&)>;

struct RankSetting {
  Failing failing;
  Accident* accident;
  std::chrono::milliseconds timeout;
  bool two_hosts;
};

pid_t start_rank(int rank, const RankSetting& setting, const Body& body,
                 const test::Folder& folder) {
  const auto& failing = setting.failing;
  return test::fork_process(
      [&, rank] {
        const RankFiles files(folder, rank);
        // Two hosts, as far as the hierarchical exchange knows.
        if (setting.two_hosts) ::setenv("SHARDSTEP_TEST_HOSTS", "a,a,b", 1);
        if (failing.may_be(rank)) {
          at_points.name = failing.point;
          at_points.accident = setting.accident;
          at_points.signal = failing.signal;
        }
        if (failing.rank == kNobody || failing.may_be(rank)) detail::on_failure_point = on_point;
        std::string outcome;
        try {
          // Never destroyed, like the default group: Gloo's threads are joined then, and one that
          // is in the middle of a collective may wait until the timeout.
          auto* const group = new ProcessGroupPtr(
              test::join_group(c10::make_intrusive<c10d::FileStore>(folder / "store", kDyingRanks),
                               rank, kDyingRanks, setting.timeout));
          ++setting.accident->connected;
          while (setting.accident->connected < kDyingRanks) std::this_thread::yield();
          outcome = "done " + body(*group);
        } catch (const std::exception& error) {
          outcome = c10::str("error ", error.what());
        }
        detail::on_failure_point = nullptr;
        std::ofstream(files.outcome) << outcome;
        std::ofstream reached(files.reached);
        for (const auto& [name, count] : at_points.reached) reached << count << ' ' << name << '\n';
      },
      120);
}

// Shared memory and locks have no other holders: segments are files without a name, and locks are
// those of open files, so the kernel drops both with the last process.
void expect_no_process_is_left() {
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

// Runs `body` on all ranks, one of which may fail; ends with all of them. A stopped rank goes on
// when the others have ended.
std::vector<Fate> run_dying(const Failing& failing, const Body& body, const Way& way,
                            std::chrono::milliseconds timeout = kLongTimeout) {
  const test::Folder folder;
  // A process that outlives the rank that started it becomes ours.
  TORCH_CHECK(::prctl(PR_SET_CHILD_SUBREAPER, 1) == 0, "prctl failed");
  const test::Shared<Accident> accident;
  accident->left = failing.occurrence;
  const RankSetting setting{failing, &*accident, timeout,
                            way.exchange == ExchangeKind::kHierarchical};
  std::vector<pid_t> pids;
  for (int rank = 0; rank < kDyingRanks; ++rank) {
    pids.push_back(start_rank(rank, setting, body, folder));
  }
  std::vector<Fate> fates(kDyingRanks);
  for (int left = kDyingRanks; left > 0; --left) {
    if (left == 1 && failing.signal == SIGSTOP) ::kill(pids[failing.rank], SIGCONT);
    int status = 0;
    const pid_t pid = ::waitpid(-1, &status, 0);
    const auto rank = std::find(pids.begin(), pids.end(), pid) - pids.begin();
    fates.at(rank).status = status;
    fates[rank].ended = Clock::now();
    fates[rank].after_accident = fates[rank].ended.time_since_epoch() - accident->when.load();
  }
  expect_no_process_is_left();
  for (int rank = 0; rank < kDyingRanks; ++rank) {
    const RankFiles files(folder, rank);
    fates[rank].outcome = text_of(files.outcome);
    std::istringstream reached(text_of(files.reached));
    int count = 0;
    for (std::string name; reached >> count && std::getline(reached >> std::ws, name);) {
      fates[rank].reached[name] = count;
    }
  }
  return fates;
}

Body training(const Way& way, const Place& place, int steps = kTrainedSteps) {
  return [way, &place, steps](const ProcessGroupPtr& group) {
    TrainingRun run(way, group, place);
    run.train(steps);
    return run.digest();
  };
}

// A run in which nobody dies, and one that goes on from it for a step.
struct Reference {
  std::string outcome, later_outcome;
  std::map<std::string, int> reached[kDyingRanks];
};

void expect_done(const std::vector<Fate>& fates) {
  for (const auto& fate : fates) {
    EXPECT_EQ(fate.status, 0);
    EXPECT_EQ(fate.outcome, fates[0].outcome);
    EXPECT_TRUE(fate.outcome.starts_with("done ")) << fate.outcome;
  }
}

const Reference& reference_of(const Way& way) {
  static std::map<std::string, Reference> known;
  auto& reference = known[name_of(way)];
  if (!reference.outcome.empty()) return reference;
  const Place place;
  SCOPED_TRACE(name_of(way));
  const auto fates = run_dying({}, training(way, place), way);
  expect_done(fates);
  for (int rank = 0; rank < kDyingRanks; ++rank) reference.reached[rank] = fates[rank].reached;
  reference.outcome = fates[0].outcome;
  const auto later = run_dying({}, training(way, place, kTrainedSteps + 1), way);
  expect_done(later);
  for (const auto& began : place.progress->began) EXPECT_EQ(began, kTrainedSteps);
  reference.later_outcome = later[0].outcome;
  return reference;
}

// Of the checkpoint that was there, of the one that was being written, and what they are written
// as first; the lock has a name, but is held by processes only.
void expect_only_files_of_checkpoints(const Place& place) {
  static const std::regex expected(
      R"((index\.json|index-\w+\.json|shard-\w+-\d+\.safetensors|writer\.lock)(\.tmp-\d+-\d+)?)");
  for (const auto& name : test::names_in(place.folder / ".")) EXPECT_EQ(name, "checkpoint");
  if (!fs::exists(place.directory)) return;
  const auto names = test::names_in(place.directory);
  for (const auto& name : names) EXPECT_TRUE(std::regex_match(name, expected)) << name;
  EXPECT_LE(names.size(), 2 * (1 + kDyingRanks) + 2) << ::testing::PrintToString(names);
}

struct Death {
  Way way;
  Failing failing;
};

std::string name_of(const Death& death) {
  const auto rank = death.failing.rank;
  const auto who = rank == kWhoever ? "any rank" : c10::str("rank ", rank);
  return c10::str(name_of(death.way), ": ", who, " at \"", death.failing.point, "\", time ",
                  death.failing.occurrence);
}

// The ranks that an error names, besides "(rank r of w)", which says whose error it is.
std::set<int> ranks_named(std::string error) {
  static const std::regex whose(R"( \(rank \d+ of \d+\))"), rank(R"(rank (\d+))");
  error = std::regex_replace(error, whose, "");
  std::set<int> named;
  for (std::sregex_iterator found(error.begin(), error.end(), rank), end; found != end; ++found) {
    named.insert(std::stoi((*found)[1]));
  }
  return named;
}

// What DDP leaves to c10d's reducer does not say whom it lost.
bool is_an_error_of_ddp(const Way& way, const std::string& outcome) {
  return way.training == Training::kHooks && outcome.find("shardstep") == std::string::npos &&
         outcome.find("gloo") != std::string::npos;
}

// Every rank that has raised names the one that died. If another rank heard of it first and left,
// a third may have lost that one before it hears of the death, and names it instead.
void expect_named(const Way& way, int victim, const std::vector<Fate>& fates, int rank) {
  const int other = kDyingRanks - victim - rank;
  const auto& outcome = fates[rank].outcome;
  if (is_an_error_of_ddp(way, outcome)) return;
  EXPECT_NE(outcome.find(c10::str("(rank ", rank, " of 3)")), std::string::npos) << outcome;
  const auto named = ranks_named(outcome);
  const bool other_names_it = is_an_error_of_ddp(way, fates[other].outcome) ||
                              (fates[other].outcome.starts_with("error ") &&
                               ranks_named(fates[other].outcome).contains(victim));
  EXPECT_TRUE(named.contains(victim) || (other_names_it && named.contains(other)))
      << "rank " << rank << ": " << outcome;
}

void expect_survivors_raise(const Death& death, const std::vector<Fate>& fates, int victim) {
  for (int rank = 0; rank < kDyingRanks; ++rank) {
    if (rank == victim) continue;
    const auto& outcome = fates[rank].outcome;
    EXPECT_EQ(fates[rank].status, 0) << "rank " << rank;
    EXPECT_LT(fates[rank].ended - fates[victim].ended, test::patience() * test::kPromised)
        << "rank " << rank << ": " << outcome;
    // Who needed nothing more of it is done.
    if (outcome == reference_of(death.way).outcome) continue;
    EXPECT_TRUE(outcome.starts_with("error ")) << "rank " << rank << ": " << outcome;
    expect_named(death.way, victim, fates, rank);
  }
}

// It begins no earlier than at the last save that had returned, and makes at least one step, and a
// save, which removes what was left behind. Returns where it began.
int expect_new_run_goes_on(const Way& way, const Place& place) {
  expect_only_files_of_checkpoints(place);
  auto& [began, saved] = *place.progress;
  const int last_saved = place.progress->last_saved();
  for (auto& step : began) step = -1;
  for (const auto& fate : run_dying({}, training(way, place, kTrainedSteps + 1), way)) {
    EXPECT_EQ(fate.outcome, reference_of(way).later_outcome);
  }
  for (const auto& step : began) {
    EXPECT_GE(step, last_saved) << "a save that had returned was lost";
    EXPECT_LE(step, kTrainedSteps);
    EXPECT_EQ(step, began[0]);
  }
  EXPECT_EQ(test::names_in(place.directory).size(), 1 + kDyingRanks);
  return began[0];
}

// Returns where the new run began.
int die(const Death& death) {
  SCOPED_TRACE(name_of(death));
  const Place place;
  const auto fates = run_dying(death.failing, training(death.way, place), death.way);
  std::vector<int> victims;
  for (int rank = 0; rank < kDyingRanks; ++rank) {
    const int status = fates[rank].status;
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) victims.push_back(rank);
  }
  EXPECT_EQ(victims.size(), 1u) << "the point was not reached, or a rank was killed by others";
  if (victims.size() != 1) return 0;
  EXPECT_TRUE(death.failing.may_be(victims[0])) << victims[0];
  expect_survivors_raise(death, fates, victims[0]);
  return expect_new_run_goes_on(death.way, place);
}

// Which rank makes a segment and which open it is a race; how many there are is not.
bool is_decided_by_a_race(const std::string& point) { return point.starts_with("segment: "); }

// Each point x way x rank; the first time that it is reached and the last.
std::vector<Death> all_deaths() {
  std::vector<Death> deaths;
  for (const auto& way : all_trainings()) {
    std::map<std::pair<std::string, int>, int> counts;
    for (int rank = 0; rank < kDyingRanks; ++rank) {
      for (const auto& [point, count] : reference_of(way).reached[rank]) {
        counts[{point, is_decided_by_a_race(point) ? kWhoever : rank}] += count;
      }
    }
    for (const auto& [where, count] : counts) {
      deaths.push_back({way, {where.second, where.first, 1}});
      if (count > 1) deaths.push_back({way, {where.second, where.first, count}});
    }
  }
  return deaths;
}

TEST(Death, EveryPointIsReached) {
  std::set<std::string> reached;
  for (const auto& way : all_trainings()) {
    for (const auto& points : reference_of(way).reached) {
      for (const auto& [name, count] : points) reached.insert(name);
    }
  }
  const auto points = detail::failure_points();
  EXPECT_GE(points.size(), 30u);
  EXPECT_EQ(std::vector<std::string>(reached.begin(), reached.end()), points);
}

TEST(Death, AtEachPointTheOthersRaiseAndANewRunGoesOn) {
  const auto deaths = all_deaths();
  int killed = 0, went_on = 0;
  // SHARDSTEP_DEATHS="stage 2, native: rank 0" chooses those whose name contains that.
  const char* const chosen = std::getenv("SHARDSTEP_DEATHS");
  for (const auto& death : chosen ? deaths : test::sample(deaths, 3)) {
    if (chosen && name_of(death).find(chosen) == std::string::npos) continue;
    went_on += die(death) > 0;
    ++killed;
  }
  std::printf("killed at %d of %zu points x exchanges x ranks x times; %d went on from a save\n",
              killed, deaths.size(), went_on);
}

const std::vector<ExchangeKind> kExchanges{ExchangeKind::kSharedMemory, ExchangeKind::kPairwise,
                                           ExchangeKind::kNative, ExchangeKind::kHierarchical};

void stop_for_longer_than_the_timeout(ExchangeKind exchange, int rank_that_stops) {
  const Way way{Training::kStage2, exchange};
  SCOPED_TRACE(name_of(way));
  const Place place;
  const Failing failing{rank_that_stops, "step: updated", 2, SIGSTOP};
  constexpr auto kTimeout = std::chrono::seconds(2);
  const auto fates = run_dying(failing, training(way, place), way, kTimeout);
  for (int rank = 0; rank < kDyingRanks; ++rank) {
    EXPECT_EQ(fates[rank].status, 0) << "rank " << rank;
    EXPECT_TRUE(fates[rank].outcome.starts_with("error ")) << fates[rank].outcome;
    EXPECT_NE(fates[rank].outcome.find(c10::str("(rank ", rank, " of 3)")), std::string::npos)
        << fates[rank].outcome;
    if (rank == failing.rank) continue;
    expect_named(way, failing.rank, fates, rank);
    EXPECT_LT(fates[rank].after_accident, kTimeout + test::patience() * kPromisedAfterTimeout)
        << "rank " << rank;
  }
  EXPECT_GE(expect_new_run_goes_on(way, place), 1);
}

void leave_by_an_exception(ExchangeKind exchange) {
  const Way way{Training::kStage2, exchange};
  SCOPED_TRACE(name_of(way));
  const Place place;
  const auto fates = run_dying(
      {},
      [&](const ProcessGroupPtr& group) {
        TrainingRun run(way, group, place);
        run.train(kTrainedSteps, [&](int step) {
          if (step == 2 && group->getRank() == 1) throw std::runtime_error("no more data");
        });
        return run.digest();
      },
      way);
  EXPECT_EQ(fates[1].outcome, "error no more data");
  for (int rank : {0, 2}) {
    EXPECT_TRUE(fates[rank].outcome.starts_with("error ")) << fates[rank].outcome;
    EXPECT_LT(fates[rank].ended - fates[1].ended, test::patience() * test::kPromised);
    expect_named(way, 1, fates, rank);
  }
  EXPECT_GE(expect_new_run_goes_on(way, place), 1);
}

TEST(Death, ARankThatIsStoppedForLongerThanTheTimeoutIsAnErrorOnAll) {
  for (auto exchange : test::sample(kExchanges, 1)) stop_for_longer_than_the_timeout(exchange, 1);
}

// As after a power cut, nothing closes its connections. Rank 2 is alone on its host.
TEST(Death, AHostThatFallsSilentIsAnErrorOnTheOthersAtTheTimeout) {
  stop_for_longer_than_the_timeout(ExchangeKind::kHierarchical, 2);
}

TEST(Death, ARankThatLeavesByAnExceptionIsAnErrorOnTheOthers) {
  for (auto exchange : kExchanges) leave_by_an_exception(exchange);
}

}  // namespace
}  // namespace shardstep

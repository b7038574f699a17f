// Real launchers, real processes. CMake defines the paths SHARDSTEP_TEST_PROGRAM and
// SHARDSTEP_TEST_TORCHRUN.

#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "support/folder.h"
#include "support/subprocess.h"

namespace shardstep::test {
namespace {

const std::string kProgram = SHARDSTEP_TEST_PROGRAM;
const std::string kTorchrun = SHARDSTEP_TEST_TORCHRUN;

void expect_two_ranks(const ProcessResult& result) {
  EXPECT_FALSE(result.timed_out) << result.output;
  EXPECT_EQ(result.exit_code, 0) << result.output;
  for (const char* line : {"rank 0 of 2: sum 3, reversed rank 1, sum 3",
                           "rank 1 of 2: sum 3, reversed rank 0, sum 3"}) {
    EXPECT_NE(result.output.find(line), std::string::npos) << result.output;
  }
}

std::vector<std::string> torchrun_two(const std::vector<std::string>& extra) {
  std::vector<std::string> command = {kTorchrun, "--no-python", "--nproc-per-node", "2"};
  command.insert(command.end(), extra.begin(), extra.end());
  return command;
}

// Two mpiruns that make one folder for their sessions at the same moment get in each other's way:
// each has its own.
std::unique_ptr<Subprocess> mpirun_two(const std::string& mpirun, const Folder& sessions) {
  return std::make_unique<Subprocess>(
      std::vector<std::string>{mpirun, "-np", "2", "--allow-run-as-root", "--oversubscribe",
                               "--bind-to", "none", kProgram},
      std::vector<std::string>{"TMPDIR=" + sessions / ""});
}

TEST(Launcher, NoneIsAGroupOfOne) {
  auto result = Subprocess({kProgram}).wait();
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_EQ(result.output, "rank 0 of 1: sum 1, reversed rank 0, sum 1\n");
}

TEST(Launcher, HalfSetEnvironmentNamesTheVariable) {
  auto result = Subprocess({kProgram}, {"RANK=0", "MASTER_ADDR=127.0.0.1"}).wait();
  EXPECT_EQ(result.exit_code, 1) << result.output;
  EXPECT_NE(result.output.find("expected WORLD_SIZE"), std::string::npos) << result.output;
}

TEST(Launcher, Torchrun) {
  if (kTorchrun.empty()) GTEST_SKIP() << "torchrun not found when configuring";
  expect_two_ranks(Subprocess(torchrun_two({"--standalone", kProgram})).wait());
}

TEST(Launcher, TorchrunWithItsDefaultRendezvous) {
  if (kTorchrun.empty()) GTEST_SKIP() << "torchrun not found when configuring";
  auto port = std::to_string(20000 + getpid() % 10000);
  expect_two_ranks(Subprocess(torchrun_two({"--master-port", port, kProgram})).wait());
}

TEST(Launcher, TorchrunRestartsDoNotMeetOldKeys) {
  if (kTorchrun.empty()) GTEST_SKIP() << "torchrun not found when configuring";
  expect_two_ranks(
      Subprocess(torchrun_two({"--standalone", "--max-restarts", "1", kProgram, "fail-first"}))
          .wait());
}

TEST(Launcher, TwoMpirunsSideBySide) {
  auto mpirun = find_program("mpirun");
  if (mpirun.empty()) GTEST_SKIP() << "mpirun is not installed (Debian: openmpi-bin)";
  const Folder sessions, others;
  auto first = mpirun_two(mpirun, sessions);
  auto second = mpirun_two(mpirun, others);
  expect_two_ranks(first->wait());
  expect_two_ranks(second->wait());
}

TEST(Launcher, Srun) {
  auto job = "SLURM_JOB_ID=" + std::to_string(getpid());
  auto start = [&](const char* rank) {
    return std::make_unique<Subprocess>(
        std::vector<std::string>{kProgram},
        std::vector<std::string>{job, "SLURM_STEP_ID=0", std::string("SLURM_PROCID=") + rank,
                                 "SLURM_NTASKS=2", "SLURM_LAUNCH_NODE_IPADDR=127.0.0.1"});
  };
  auto other = start("1");
  auto first = start("0");
  auto result = first->wait();
  auto other_result = other->wait();
  EXPECT_EQ(other_result.exit_code, 0) << other_result.output;
  result.output += other_result.output;
  expect_two_ranks(result);
}

}  // namespace
}  // namespace shardstep::test

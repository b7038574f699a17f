#include "launch/launch_environment.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

namespace shardstep::detail {
namespace {

using Environment = std::map<std::string, std::string>;

LaunchEnvironment read(const Environment& environment) {
  return read_launch_environment([&](const char* name) -> std::optional<std::string> {
    auto found = environment.find(name);
    if (found == environment.end() || found->second.empty()) return std::nullopt;
    return found->second;
  });
}

Environment with(Environment environment, const Environment& changes) {
  for (auto& [name, value] : changes) environment[name] = value;
  return environment;
}

const Environment kTorchrun = {{"RANK", "1"},
                               {"WORLD_SIZE", "4"},
                               {"MASTER_ADDR", "node7"},
                               {"MASTER_PORT", "29400"},
                               {"TORCHELASTIC_RUN_ID", "job"},
                               {"TORCHELASTIC_RESTART_COUNT", "0"},
                               {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
const Environment kMpirun = {{"OMPI_COMM_WORLD_RANK", "0"},
                             {"OMPI_COMM_WORLD_SIZE", "2"},
                             {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                             {"PMIX_NAMESPACE", "2107506689"},
                             {"PMIX_SERVER_TMPDIR", "/tmp/ompi.host.0/pid.7"}};
const Environment kSrun = {{"SLURM_PROCID", "3"},
                           {"SLURM_NTASKS", "8"},
                           {"SLURM_JOB_ID", "77"},
                           {"SLURM_STEP_ID", "0"},
                           {"SLURM_STEP_NUM_NODES", "2"},
                           {"SLURM_STEP_NUM_TASKS", "4"},
                           {"SLURM_STEP_NODELIST", "gpu[07-09,12]"},
                           {"SLURM_LAUNCH_NODE_IPADDR", "10.0.0.5"}};

TEST(LaunchEnvironment, NothingIsAGroupOfOne) {
  for (const Environment& environment : std::vector<Environment>{
           {},
           {{"RANK", ""}, {"WORLD_SIZE", ""}},
           // An allocation whose program was not started by srun: salloc's shell, sbatch's script,
           // Slurm's own interactive step.
           {{"SLURM_JOB_ID", "5"}, {"SLURM_NTASKS", "16"}},
           {{"SLURM_JOB_ID", "5"}, {"SLURM_NTASKS", "16"}, {"SLURM_PROCID", "0"}},
           {{"SLURM_JOB_ID", "5"},
            {"SLURM_NTASKS", "16"},
            {"SLURM_PROCID", "0"},
            {"SLURM_STEP_ID", "4294967290"}}}) {
    auto launch = read(environment);
    EXPECT_EQ(launch.launcher, Launcher::kNone);
    EXPECT_EQ(launch.rank, 0);
    EXPECT_EQ(launch.world_size, 1);
  }
}

TEST(LaunchEnvironment, Torchrun) {
  auto launch = read(kTorchrun);
  EXPECT_EQ(launch.launcher, Launcher::kTorchrun);
  EXPECT_EQ(launch.rank, 1);
  EXPECT_EQ(launch.world_size, 4);
  EXPECT_EQ(launch.host, "node7");
  EXPECT_EQ(launch.port, 29400);
  EXPECT_EQ(launch.store_file, "");
  EXPECT_FALSE(launch.hosts_store);
  EXPECT_FALSE(read(with(kTorchrun, {{"RANK", "0"}})).hosts_store) << "the agent hosts the store";
  EXPECT_TRUE(read(with(kTorchrun, {{"RANK", "0"}, {"TORCHELASTIC_USE_AGENT_STORE", "False"}}))
                  .hosts_store);
  EXPECT_NE(launch.key_prefix,
            read(with(kTorchrun, {{"TORCHELASTIC_RESTART_COUNT", "1"}})).key_prefix);
}

TEST(LaunchEnvironment, ByHandWithoutTorchrun) {
  auto launch =
      read({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "::1"}, {"MASTER_PORT", "1"}});
  EXPECT_TRUE(launch.hosts_store);
  EXPECT_EQ(read({{"RANK", "0"}, {"WORLD_SIZE", "1"}}).world_size, 1) << "needs no address";
}

TEST(LaunchEnvironment, MpirunOnOneHost) {
  auto launch = read(kMpirun);
  EXPECT_EQ(launch.launcher, Launcher::kOpenMpi);
  EXPECT_EQ(launch.world_size, 2);
  EXPECT_EQ(launch.store_file, "/tmp/ompi.host.0/pid.7/shardstep-2107506689");

  auto by_port = with(kMpirun, {{"PMIX_SERVER_TMPDIR", ""}});
  launch = read(by_port);
  EXPECT_EQ(launch.store_file, "");
  EXPECT_EQ(launch.host, "127.0.0.1");
  EXPECT_TRUE(launch.hosts_store);
  auto other_rank = read(with(by_port, {{"OMPI_COMM_WORLD_RANK", "1"}}));
  EXPECT_EQ(other_rank.port, launch.port);
  EXPECT_FALSE(other_rank.hosts_store);
  auto other_job = read(with(by_port, {{"PMIX_NAMESPACE", "2107506690"}}));
  EXPECT_NE(other_job.port, launch.port);
  EXPECT_NE(other_job.key_prefix, launch.key_prefix);
}

TEST(LaunchEnvironment, MpirunOnSeveralHosts) {
  auto environment = with(kMpirun, {{"OMPI_COMM_WORLD_SIZE", "4"}, {"MASTER_ADDR", "node1"}});
  auto launch = read(environment);
  EXPECT_EQ(launch.store_file, "");
  EXPECT_EQ(launch.host, "node1");
  EXPECT_GE(launch.port, 1024);
  EXPECT_EQ(read(with(environment, {{"MASTER_PORT", "4242"}})).port, 4242);
}

TEST(LaunchEnvironment, Srun) {
  auto launch = read(kSrun);
  EXPECT_EQ(launch.launcher, Launcher::kSlurm);
  EXPECT_EQ(launch.rank, 3);
  EXPECT_EQ(launch.world_size, 4) << "the step's tasks, not the allocation's";
  EXPECT_EQ(launch.host, "gpu07");
  EXPECT_FALSE(launch.hosts_store);
  auto next_step = read(with(kSrun, {{"SLURM_STEP_ID", "1"}}));
  EXPECT_NE(next_step.port, launch.port);
  EXPECT_NE(next_step.key_prefix, launch.key_prefix);
  EXPECT_EQ(read(with(kSrun, {{"SLURM_STEP_NODELIST", ""}})).host, "10.0.0.5");
  EXPECT_EQ(read(with(kSrun, {{"SLURM_STEP_NUM_NODES", "1"}})).host, "127.0.0.1");
  EXPECT_EQ(read(with(kSrun, {{"MASTER_ADDR", "a"}, {"MASTER_PORT", "9"}})).host, "a");
  EXPECT_EQ(read(with(kSrun, {{"SLURM_STEP_NUM_TASKS", ""}})).world_size, 8);
}

TEST(LaunchEnvironment, TheInnermostLauncherWins) {
  EXPECT_EQ(read(with(kSrun, kTorchrun)).launcher, Launcher::kTorchrun);
  EXPECT_EQ(read(with(kSrun, kMpirun)).launcher, Launcher::kOpenMpi);
}

TEST(LaunchEnvironment, FirstSlurmHost) {
  const Environment cases = {{"n1", "n1"},   {"n1,n2", "n1"},      {"gpu[07-09,12]", "gpu07"},
                             {"a[3]", "a3"}, {"r[1-2]c,b", "r1c"}, {"x[10,12],y[1-2]", "x10"}};
  for (auto& [list, host] : cases) EXPECT_EQ(first_slurm_host(list), host) << list;
  EXPECT_THROW(first_slurm_host("a[3"), c10::ValueError);
}

TEST(LaunchEnvironment, ErrorsNameTheVariableAndItsValue) {
  struct Case {
    Environment environment;
    std::vector<std::string> expected;
  };
  const std::vector<Case> cases = {
      {{{"RANK", "0"}}, {"WORLD_SIZE", "RANK"}},
      {{{"WORLD_SIZE", "2"}}, {"expected RANK"}},
      {with(kTorchrun, {{"RANK", "one"}}), {"RANK", "\"one\""}},
      {with(kTorchrun, {{"RANK", "1x"}}), {"RANK", "\"1x\""}},
      {with(kTorchrun, {{"RANK", "-1"}}), {"RANK", "\"-1\""}},
      {with(kTorchrun, {{"RANK", "4"}}), {"RANK=4", "WORLD_SIZE=4"}},
      {with(kTorchrun, {{"WORLD_SIZE", "0"}}), {"WORLD_SIZE", "\"0\""}},
      {with(kTorchrun, {{"WORLD_SIZE", "99999999999999999999"}}), {"WORLD_SIZE"}},
      {with(kTorchrun, {{"MASTER_ADDR", ""}}), {"expected MASTER_ADDR"}},
      {with(kTorchrun, {{"MASTER_PORT", ""}}), {"expected MASTER_PORT"}},
      {with(kTorchrun, {{"MASTER_PORT", "70000"}}), {"MASTER_PORT", "\"70000\""}},
      {with(kTorchrun, {{"MASTER_PORT", "0"}}), {"MASTER_PORT", "\"0\""}},
      {{{"MASTER_ADDR", "node1"}}, {"MASTER_ADDR=node1", "RANK"}},
      {{{"MASTER_PORT", "1234"}}, {"MASTER_PORT=1234", "RANK"}},
      {with(kMpirun, {{"OMPI_COMM_WORLD_RANK", ""}}), {"expected OMPI_COMM_WORLD_RANK"}},
      {with(kMpirun, {{"OMPI_COMM_WORLD_SIZE", "4"}}), {"MASTER_ADDR", "2 of 4", "-x"}},
      {with(kMpirun, {{"PMIX_NAMESPACE", ""}}), {"expected PMIX_NAMESPACE"}},
      {with(kSrun, {{"SLURM_PROCID", ""}}), {"expected SLURM_PROCID"}},
      {with(kSrun, {{"SLURM_PROCID", "4"}}), {"SLURM_PROCID=4", "SLURM_STEP_NUM_TASKS=4"}},
      {with(kSrun, {{"SLURM_JOB_ID", ""}}), {"expected SLURM_JOB_ID"}},
      {with(kSrun, {{"SLURM_STEP_ID", "x"}}), {"SLURM_STEP_ID", "\"x\""}},
      {with(kSrun, {{"SLURM_STEP_NODELIST", ""}, {"SLURM_LAUNCH_NODE_IPADDR", ""}}),
       {"SLURM_STEP_NODELIST", "MASTER_ADDR"}},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    try {
      read(cases[i].environment);
      ADD_FAILURE() << "case " << i << " was accepted; wanted " << cases[i].expected[0];
    } catch (const c10::ValueError& error) {
      const std::string message = error.what_without_backtrace();
      for (auto& expected : cases[i].expected) {
        EXPECT_NE(message.find(expected), std::string::npos) << i << ": " << message;
      }
    }
  }
}

}  // namespace
}  // namespace shardstep::detail

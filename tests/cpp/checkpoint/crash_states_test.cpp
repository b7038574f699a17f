// Logs the calls by which saves reach the disk, and replays every state that a failure of the
// machine may leave after each of them: a reader gets the old checkpoint or the new one, whole.
// proofs/checkpoint_commit.pml explores the same for all orders of calls.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "checkpoint/crash/crash_support.h"
#include "checkpoint/crash/disk.h"
#include "checkpoint/crash/file_calls.h"
#include "support/folder.h"
#include "support/full_run.h"

namespace shardstep {
namespace {

struct LoggedSave {
  int ranks;
  bool asynchronous;
  bool overwrites;
};

std::vector<LoggedSave> all_saves() {
  std::vector<LoggedSave> saves;
  for (int ranks : {1, 2, 3}) {
    for (bool asynchronous : {false, true}) {
      for (bool overwrites : {false, true}) saves.push_back({ranks, asynchronous, overwrites});
    }
  }
  return saves;
}

// Ranks that save to the directory, once or twice. Marks: "begin" before the last save, "saved"
// when it has returned on rank 0, and the ids of the checkpoints.
std::vector<crash::LoggedCall> log_save(const LoggedSave& save, const test::Folder& folder) {
  const auto directory = folder / "checkpoint";
  std::filesystem::create_directories(directory);
  crash::CallLog log(directory);
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < save.ranks; ++rank) {
    ranks.push_back(crash::fork_process([&, rank] {
      crash::Trained run(crash::join_group(
          c10::make_intrusive<c10d::FileStore>(folder / "store", save.ranks), rank, save.ranks));
      log.start();
      if (save.overwrites) {
        run.step_to(1);
        run.save(directory, false);
        if (rank == 0) log.mark("id " + Checkpoint(directory).index().id);
      }
      // Nobody begins before rank 0 has put its mark.
      if (rank == 0) log.mark("begin");
      run.step_to(2);
      run.save(directory, save.asynchronous);
      run.zero().wait_checkpoint();
      if (rank == 0) {
        log.mark("saved");
        log.mark("id " + Checkpoint(directory).index().id);
      }
    }));
  }
  for (pid_t rank : ranks) EXPECT_EQ(crash::status_of(rank), 0);
  return log.read();
}

void write_state(const std::string& directory, const crash::DiskState& state) {
  std::filesystem::remove_all(directory);
  std::filesystem::create_directories(directory);
  for (const auto& [name, content] : state) {
    std::ofstream(directory + "/" + name, std::ios::binary) << content;
  }
}

crash::DiskState read_state(const std::string& directory) {
  crash::DiskState state;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    std::ifstream file(entry.path(), std::ios::binary);
    state[entry.path().filename().string()] = {std::istreambuf_iterator<char>(file), {}};
  }
  return state;
}

std::string names_of(const crash::DiskState& state) {
  std::string text;
  for (const auto& [name, content] : state) text += c10::str(" ", name, ":", content.size());
  return text;
}

// The id of the whole checkpoint that a reader finds; "none", or what is wrong with it.
std::string id_in(const std::string& directory) {
  if (!std::filesystem::exists(directory + "/index.json")) return "none";
  try {
    Checkpoint checkpoint(directory);
    checkpoint.verify();
    return checkpoint.index().id;
  } catch (const std::exception& error) {
    return error.what();
  }
}

// Replays all states; prints how many there were. In the end the replayed directory is as the real
// one, or a call was not logged.
void check_states(const std::vector<crash::LoggedCall>& log, const std::string& real,
                  const std::string& directory, const std::string& name) {
  std::vector<std::string> ids;
  for (const auto& call : log) {
    if (call.kind == crash::LoggedCall::kMark && call.name.starts_with("id ")) {
      ids.push_back(call.name.substr(3));
    }
  }
  crash::Disk disk;
  std::map<crash::DiskState, std::string> known;
  bool begun = false, saved = false;
  int calls = 0;
  size_t states = 0;
  for (const auto& call : log) {
    disk.replay(call);
    begun = begun || call.name == "begin";
    saved = saved || call.name == "saved";
    if (!begun) continue;
    ++calls;
    std::vector<std::string> allowed{ids.back()};
    if (!saved) allowed.push_back(ids.size() > 1 ? ids.front() : "none");
    for (const auto& state : disk.after_failure()) {
      ++states;
      auto& found = known[state];
      if (found.empty()) {
        write_state(directory, state);
        found = id_in(directory);
      }
      ASSERT_NE(std::find(allowed.begin(), allowed.end(), found), allowed.end())
          << name << ", after call " << calls << " (" << call.kind << " " << call.name << " "
          << call.to << "), a disk with" << names_of(state) << " holds: " << found;
    }
  }
  EXPECT_TRUE(saved);
  EXPECT_TRUE(disk.now() == read_state(real));
  std::printf("%s: %d calls, %zu states, %zu of them different\n", name.c_str(), calls, states,
              known.size());
}

TEST(CrashStates, AReaderGetsTheOldCheckpointOrTheNewOne) {
  for (const auto& save : test::sample(all_saves(), 4)) {
    const test::Folder folder;
    const auto log = log_save(save, folder);
    const auto name =
        c10::str(save.ranks, " ranks, ", save.asynchronous ? "in the background" : "blocking", ", ",
                 save.overwrites ? "over another" : "the first");
    const auto pid = crash::fork_process(
        [&] { check_states(log, folder / "checkpoint", folder / "state", name); }, 600);
    EXPECT_EQ(crash::status_of(pid), 0) << name;
  }
}

// Whoever renames an index before its shards' names are durable is caught.
TEST(CrashStates, ARenameWithoutASyncedDirectoryMayBeUndone) {
  using crash::LoggedCall;
  crash::Disk disk;
  const auto call = [](LoggedCall::Kind kind, uint64_t inode, const std::string& name,
                       const std::string& to = "", const std::string& data = "") {
    return LoggedCall{kind, inode, 0, name, to, data};
  };
  disk.replay(call(LoggedCall::kCreate, 1, "a"));
  disk.replay(call(LoggedCall::kSyncDirectory, 0, ""));
  disk.replay(call(LoggedCall::kWrite, 1, "", "", "abcd"));
  EXPECT_EQ(disk.after_failure(),
            (std::set<crash::DiskState>{
                {{"a", ""}}, {{"a", "ab"}}, {{"a", std::string("ab\0\0", 4)}}, {{"a", "abcd"}}}));
  disk.replay(call(LoggedCall::kSync, 1, ""));
  disk.replay(call(LoggedCall::kRename, 0, "a", "b"));
  disk.replay(call(LoggedCall::kLink, 0, "b", "c"));
  EXPECT_EQ(disk.after_failure(), (std::set<crash::DiskState>{
                                      {{"a", "abcd"}},
                                      {{"b", "abcd"}},
                                      {{"a", "abcd"}, {"c", "abcd"}},
                                      {{"b", "abcd"}, {"c", "abcd"}},
                                  }));
}

}  // namespace
}  // namespace shardstep

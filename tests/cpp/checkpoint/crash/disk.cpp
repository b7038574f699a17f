#include "checkpoint/crash/disk.h"

#include <algorithm>

namespace shardstep::crash {

void Disk::Change::apply(Names& names) const {
  if (!removed.empty()) names.erase(removed);
  if (!added.empty()) names[added] = file;
}

void Disk::change(Change change) {
  change.apply(now_);
  unsynced_.push_back(std::move(change));
}

void Disk::replay(const LoggedCall& call) {
  switch (call.kind) {
    case LoggedCall::kCreate:
      files_[call.inode] = std::make_shared<File>();
      return change({"", call.name, files_[call.inode]});
    case LoggedCall::kWrite: {
      auto& file = *files_.at(call.inode);
      const auto end = static_cast<size_t>(call.offset) + call.data.size();
      if (file.now.size() < end) file.now.resize(end);
      std::copy(call.data.begin(), call.data.end(), file.now.begin() + call.offset);
      file.is_synced = false;
      return;
    }
    case LoggedCall::kSync: {
      auto& file = *files_.at(call.inode);
      file.synced = file.now;
      file.is_synced = true;
      return;
    }
    case LoggedCall::kSyncDirectory:
      synced_ = now_;
      return unsynced_.clear();
    case LoggedCall::kRename:
      return change({call.name, call.to, now_.at(call.name)});
    case LoggedCall::kLink:
      return change({"", call.to, now_.at(call.name)});
    case LoggedCall::kUnlink:
      return change({call.name, "", nullptr});
    case LoggedCall::kMark:
      return;
  }
}

DiskState Disk::now() const {
  DiskState state;
  for (const auto& [name, file] : now_) state[name] = file->now;
  return state;
}

std::vector<std::string> Disk::contents_after_failure(const File& file) {
  if (file.is_synced) return {file.now};
  auto torn = file.now;
  const auto middle = static_cast<std::ptrdiff_t>(torn.size() / 2);
  std::fill(torn.begin() + middle, torn.end(), '\0');
  return {file.now, file.synced, torn, torn.substr(0, static_cast<size_t>(middle))};
}

void Disk::add_states(const Names& names, Names::const_iterator from, DiskState& so_far,
                      std::set<DiskState>& states) {
  if (from == names.end()) {
    states.insert(so_far);
    return;
  }
  const auto& [name, file] = *from;
  // Nobody reads what has a temporary name.
  const bool unread = name.find(".tmp-") != std::string::npos || name == "writer.lock";
  for (auto& content : unread ? std::vector<std::string>{""} : contents_after_failure(*file)) {
    so_far[name] = content;
    add_states(names, std::next(from), so_far, states);
  }
  so_far.erase(name);
}

std::set<DiskState> Disk::after_failure() const {
  std::set<DiskState> states;
  for (size_t chosen = 0; chosen < size_t{1} << unsynced_.size(); ++chosen) {
    Names names = synced_;
    for (size_t i = 0; i < unsynced_.size(); ++i) {
      if (chosen >> i & 1) unsynced_[i].apply(names);
    }
    DiskState state;
    add_states(names, names.begin(), state, states);
  }
  return states;
}

}  // namespace shardstep::crash

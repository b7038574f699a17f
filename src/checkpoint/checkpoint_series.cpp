#include "checkpoint/checkpoint_series.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <regex>
#include <system_error>
#include <vector>

#include "checkpoint/checkpoint_files.h"
#include "checkpoint/checkpoint_index.h"
#include "checkpoint/directory_lock.h"
#include "format/replacing_file.h"

namespace shardstep::detail {
namespace {

namespace series_fs = std::filesystem;

// A piece of a pattern: literal text, or the name of a value.
struct PatternPiece {
  std::string text;
  bool is_name = false;
  size_t width = 0;  // zeros in front of an integer up to this
};

std::vector<PatternPiece> parse_pattern(const std::string& pattern) {
  static const std::regex kPiece(R"(\{\{|\}\}|\{([A-Za-z_]\w*)(:0(\d{1,2})d)?\})");
  std::vector<PatternPiece> pieces;
  auto from = pattern.cbegin();
  for (std::sregex_iterator found(pattern.begin(), pattern.end(), kPiece), end; found != end;
       ++found) {
    pieces.push_back({std::string(from, (*found)[0].first)});
    from = (*found)[0].second;
    if (!(*found)[1].matched) {
      pieces.push_back({(*found)[0].str().substr(0, 1)});
    } else {
      const auto width = (*found)[3].matched ? std::stoul((*found)[3].str()) : 0;
      pieces.push_back({(*found)[1].str(), true, width});
    }
  }
  pieces.push_back({std::string(from, pattern.cend())});
  return pieces;
}

std::string text_of(const PatternPiece& piece, const c10::IValue& extra,
                    const std::string& pattern) {
  c10::IValue value;
  if (extra.isGenericDict()) {
    const auto dict = extra.toGenericDict();
    if (dict.contains(piece.text)) value = dict.at(piece.text);
  }
  if (value.isInt()) {
    auto digits = std::to_string(value.toInt());
    if (digits.size() < piece.width) digits.insert(0, piece.width - digits.size(), '0');
    return digits;
  }
  const bool is_name = value.isString() && piece.width == 0 && !value.toStringRef().empty() &&
                       value.toStringRef().find('/') == std::string::npos;
  TORCH_CHECK_VALUE(is_name, "shardstep: expected an integer or a name called ", piece.text,
                    " in `extra` for the directory ", pattern, ", got ",
                    value.isNone() ? "none" : value.tagKind());
  return value.toStringRef();
}

// What the names of the series look like.
std::regex name_regex(const std::string& pattern) {
  static const std::regex kSpecial(R"([.^$|()\[\]{}*+?\\])");
  std::string expression;
  for (const auto& piece : parse_pattern(series_fs::path(pattern).filename().string())) {
    expression += piece.is_name ? "[^/]+" : std::regex_replace(piece.text, kSpecial, R"(\$&)");
  }
  return std::regex(expression);
}

struct Checkpointed {
  series_fs::file_time_type time;  // when its index was written
  series_fs::path path;
};

// The directories of a series: complete checkpoints, the newest first, and those without an index
// that have files of a save, which is under way, or died in the middle of saving or removing.
struct Siblings {
  std::vector<Checkpointed> complete;
  std::vector<series_fs::path> incomplete;
};

Siblings siblings(const std::string& pattern, const series_fs::path& parent) {
  const auto names = name_regex(pattern);
  Siblings found;
  std::error_code error;
  for (series_fs::directory_iterator entry(parent, error), end; !error && entry != end;
       entry.increment(error)) {
    std::error_code ignored;
    if (entry->is_symlink(ignored) || !std::regex_match(entry->path().filename().string(), names)) {
      continue;
    }
    const auto path = entry->path();
    const auto time = series_fs::last_write_time(path / kIndexName, ignored);
    if (ignored == std::errc::no_such_file_or_directory) {
      const auto files = names_in_directory(path.string());
      const bool is_ours = std::any_of(files.begin(), files.end(), [](const std::string& name) {
        return is_save_file(name) || id_of_previous_index(name);
      });
      if (is_ours) found.incomplete.push_back(path);
    } else if (!ignored && current_id(path.string())) {
      found.complete.push_back({time, path});
    }
  }
  std::sort(found.complete.begin(), found.complete.end(),
            [](const Checkpointed& a, const Checkpointed& b) {
              return std::tie(a.time, a.path) > std::tie(b.time, b.path);
            });
  return found;
}

// Replaces the link in one step, so that a reader finds the old one or the new one.
void point_latest(const series_fs::path& directory) {
  const auto link = directory.parent_path() / kLatestName;
  const auto temporary = link.string() + ".tmp-" + new_id();
  std::error_code error;
  const auto status = series_fs::symlink_status(link, error);
  TORCH_CHECK(!series_fs::exists(status) || series_fs::is_symlink(status),
              "shardstep: the checkpoint in ", directory.string(),
              " is complete, but cannot be made the latest: expected ", link.string(),
              " to be absent or a link, got something else");
  series_fs::create_directory_symlink(directory.filename(), temporary, error);
  if (!error) series_fs::rename(temporary, link, error);
  if (error) ::unlink(temporary.c_str());
  TORCH_CHECK(!error, "shardstep: the checkpoint in ", directory.string(),
              " is complete, but the link ", link.string(), " cannot be made: ", error.message());
  sync_directory(directory.parent_path().string());
}

series_fs::path whole_path(const std::string& directory) {
  auto path = series_fs::absolute(directory).lexically_normal();
  return path.has_filename() ? path : path.parent_path();
}

}  // namespace

std::string expand_directory(const std::string& pattern, const c10::IValue& extra) {
  std::string directory;
  for (const auto& piece : parse_pattern(pattern)) {
    directory += piece.is_name ? text_of(piece, extra, pattern) : piece.text;
  }
  return directory;
}

bool is_series(const std::string& pattern) {
  const auto pieces = parse_pattern(whole_path(pattern).filename().string());
  return std::any_of(pieces.begin(), pieces.end(), [](const auto& piece) { return piece.is_name; });
}

void update_series(const std::string& pattern, const std::string& directory,
                   std::optional<int64_t> keep_last) {
  const auto path = whole_path(directory);
  point_latest(path);
  if (!keep_last) return;
  int64_t kept = 1;
  const auto others = siblings(whole_path(pattern).string(), path.parent_path());
  for (const auto& sibling : others.complete) {
    if (sibling.path == path) continue;
    if (kept++ >= *keep_last) remove_checkpoint(sibling.path.string());
  }
  for (const auto& sibling : others.incomplete) remove_checkpoint(sibling.string());
}

bool remove_checkpoint(const std::string& directory) {
  const series_fs::path folder(directory);
  std::unique_ptr<DirectoryLock> lock;
  try {
    lock = std::make_unique<DirectoryLock>(directory);
  } catch (const c10::Error&) {
    return false;  // it is being written
  }
  // The index goes first: without it there is no checkpoint, also after a failure of the machine.
  if (!retire_index((folder / kIndexName).string())) return false;
  try {
    sync_directory(directory);
  } catch (const c10::Error&) {
    return false;
  }
  bool all = true;
  const auto names = names_in_directory(directory);
  for (const auto& name : names) {
    if (id_of_previous_index(name)) all = retire_index((folder / name).string()) && all;
  }
  if (!all) return false;
  for (const auto& name : names) {
    if (is_save_file(name)) ::unlink((folder / name).c_str());
  }
  ::unlink((folder / kLockName).c_str());
  lock = nullptr;
  ::rmdir(folder.c_str());
  return true;
}

std::string resolve_link(const std::string& directory) {
  std::error_code error;
  const auto path = whole_path(directory);
  if (!series_fs::is_symlink(series_fs::symlink_status(path, error))) return directory;
  const auto target = series_fs::read_symlink(path, error);
  return error ? directory : (path.parent_path() / target).lexically_normal().string();
}

}  // namespace shardstep::detail

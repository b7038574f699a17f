#include "checkpoint/crash/file_calls.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

namespace shardstep::crash {

std::atomic<int> calls_left{-1};
Calls calls;

// Records follow each other: a header, then name, to and data.
struct CallLog::Memory {
  static constexpr size_t kBytes = size_t{64} << 20;
  struct Header {
    LoggedCall::Kind kind;
    uint64_t inode;
    int64_t offset;
    size_t name, to, data;
  };
  std::atomic<int> taken;
  size_t used;
  char bytes[1];

  void append(const void* from, size_t size) {
    if (sizeof(Memory) + used + size > kBytes) {
      std::fprintf(stderr, "the log of calls is full\n");
      std::abort();
    }
    if (size > 0) std::memcpy(bytes + used, from, size);
    used += size;
  }
};

namespace {

std::atomic<CallLog*> log_of_calls{nullptr};

// Says whether a signal comes first.
bool count_call() {
  if (calls_left >= 0 && calls_left-- == 0) ::kill(::getpid(), SIGKILL);
  if (!calls.interrupted || !calls.next_is_interrupted.exchange(!calls.next_is_interrupted)) {
    return false;
  }
  errno = EINTR;
  return true;
}

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

uint64_t inode_of(int fd) {
  struct stat status{};
  return ::fstat(fd, &status) == 0 ? status.st_ino : 0;
}

bool is_in_log_directory(CallLog* log, int fd) {
  char path[64], target[4096];
  std::snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
  const auto size = ::readlink(path, target, sizeof(target) - 1);
  if (size <= 0) return false;
  target[size] = 0;
  return !log->name_of(target).empty();
}

// Makes a call and logs it if it succeeded, as one step.
template <class Call>
auto logged(CallLog* log, Call call, const LoggedCall& record) {
  CallLog::Turn turn(log);
  const auto result = call();
  const int error = errno;
  if (result >= 0) turn.add(record);
  errno = error;
  return result;
}

ssize_t logged_write(int fd, const void* data, size_t size, off_t offset,
                     ssize_t (*call)(int, const void*, size_t, off_t)) {
  CallLog* const log = log_of_calls;
  if (!log || !is_in_log_directory(log, fd)) return call(fd, data, size, offset);
  CallLog::Turn turn(log);
  const auto written = call(fd, data, size, offset);
  if (written > 0) {
    LoggedCall record;
    record.kind = LoggedCall::kWrite;
    record.inode = inode_of(fd);
    record.offset = offset;
    record.data.assign(static_cast<const char*>(data), static_cast<size_t>(written));
    turn.add(record);
  }
  return written;
}

int logged_names(LoggedCall::Kind kind, const char* path, const char* to,
                 int (*call)(const char*, const char*)) {
  CallLog* const log = log_of_calls;
  const auto name = log ? log->name_of(path) : "";
  if (name.empty()) return call(path, to);
  LoggedCall record;
  record.kind = kind;
  record.name = name;
  if (to) record.to = log->name_of(to);
  return logged(log, [&] { return call(path, to); }, record);
}

// Calls that change files and that the log does not know: in the log's directory they would make a
// replay wrong, so they end the process.
void refuse(const char* call, const std::string& what) {
  std::fprintf(stderr, "%s of %s is not logged: add it to file_calls.cpp\n", call, what.c_str());
  std::abort();
}

void refuse_for(const char* call, int fd) {
  if (CallLog* const log = log_of_calls; log && is_in_log_directory(log, fd)) {
    refuse(call, "a file of the directory");
  }
}

void refuse_for(const char* call, const char* path, int directory = AT_FDCWD) {
  CallLog* const log = log_of_calls;
  if (!log || !path) return;
  std::string whole = path;
  if (!whole.starts_with('/') && directory != AT_FDCWD) {
    char target[4096];
    const auto link = "/proc/self/fd/" + std::to_string(directory);
    const auto size = ::readlink(link.c_str(), target, sizeof(target));
    if (size > 0) whole = std::string(target, static_cast<size_t>(size)) + "/" + whole;
  }
  if (!log->name_of(whole.c_str()).empty()) refuse(call, whole);
}

}  // namespace

CallLog::CallLog(std::string directory) : directory_(std::move(directory)) {
  void* const memory = ::mmap(nullptr, Memory::kBytes, PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  memory_ = static_cast<Memory*>(memory);
}

CallLog::~CallLog() {
  if (log_of_calls == this) log_of_calls = nullptr;
  ::munmap(memory_, Memory::kBytes);
}

void CallLog::start() {
  struct stat status{};
  if (::stat(directory_.c_str(), &status) != 0) std::abort();
  directory_inode_ = status.st_ino;
  log_of_calls = this;
}

void CallLog::mark(const std::string& name) {
  Turn turn(this);
  LoggedCall record;
  record.name = name;
  turn.add(record);
}

std::string CallLog::name_of(const char* path) const {
  const std::string_view whole(path);
  if (whole.size() <= directory_.size() || !whole.starts_with(directory_) ||
      whole[directory_.size()] != '/') {
    return "";
  }
  return std::string(whole.substr(directory_.size() + 1));
}

std::vector<LoggedCall> CallLog::read() const {
  std::vector<LoggedCall> result;
  const char* at = memory_->bytes;
  const char* const end = at + memory_->used;
  while (at < end) {
    Memory::Header header;
    std::memcpy(&header, at, sizeof(header));
    at += sizeof(header);
    LoggedCall call;
    call.kind = header.kind;
    call.inode = header.inode;
    call.offset = header.offset;
    for (auto [text, size] : {std::pair(&call.name, header.name), std::pair(&call.to, header.to),
                              std::pair(&call.data, header.data)}) {
      text->assign(at, size);
      at += size;
    }
    result.push_back(std::move(call));
  }
  return result;
}

CallLog::Turn::Turn(CallLog* log) : log_(log) {
  while (log_->memory_->taken.exchange(1, std::memory_order_acquire) != 0) ::sched_yield();
}

CallLog::Turn::~Turn() { log_->memory_->taken.store(0, std::memory_order_release); }

void CallLog::Turn::add(const LoggedCall& call) {
  const Memory::Header header{call.kind,        call.inode,     call.offset,
                              call.name.size(), call.to.size(), call.data.size()};
  log_->memory_->append(&header, sizeof(header));
  for (const auto* text : {&call.name, &call.to, &call.data}) {
    log_->memory_->append(text->data(), text->size());
  }
}

}  // namespace shardstep::crash

using shardstep::crash::CallLog;
using shardstep::crash::calls;
using shardstep::crash::count_call;
using shardstep::crash::inode_of;
using shardstep::crash::is_in_log_directory;
using shardstep::crash::log_of_calls;
using shardstep::crash::LoggedCall;
using shardstep::crash::next;
using shardstep::crash::refuse_for;

// The library finds these before the C library's.
extern "C" {
int open(const char* path, int flags, ...) {
  if (calls.interrupted && count_call()) return -1;
  if (std::string_view(path).ends_with(".safetensors")) ++calls.opened_shards;
  std::va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  auto* const real = next<int(const char*, int, mode_t)>("open");
  CallLog* const log = log_of_calls;
  LoggedCall record;
  if (log && (flags & O_CREAT) != 0) record.name = log->name_of(path);
  if ((flags & O_TRUNC) != 0) refuse_for("open(O_TRUNC)", path);
  if (record.name.empty()) return real(path, flags, mode);
  CallLog::Turn turn(log);
  const bool existed = ::access(path, F_OK) == 0;
  const int fd = real(path, flags, mode);
  if (fd >= 0 && !existed) {
    record.kind = LoggedCall::kCreate;
    record.inode = inode_of(fd);
    turn.add(record);
  }
  return fd;
}
ssize_t pread(int fd, void* data, size_t size, off_t offset) {
  const auto count = next<ssize_t(int, void*, size_t, off_t)>("pread")(fd, data, size, offset);
  if (count > 0) calls.bytes_read += count;
  return count;
}
// What it adds to a file reads as zeros.
int fallocate(int fd, int mode, off_t offset, off_t size) {
  if (count_call()) return -1;
  auto* const real = next<int(int, int, off_t, off_t)>("fallocate");
  CallLog* const log = log_of_calls;
  if (!log || !is_in_log_directory(log, fd)) return real(fd, mode, offset, size);
  if (mode != 0) refuse_for("fallocate", fd);
  CallLog::Turn turn(log);
  struct stat before{};
  ::fstat(fd, &before);
  const int result = real(fd, mode, offset, size);
  if (result == 0 && offset + size > before.st_size) {
    LoggedCall record;
    record.kind = LoggedCall::kWrite;
    record.inode = before.st_ino;
    record.offset = before.st_size;
    record.data.assign(static_cast<size_t>(offset + size - before.st_size), '\0');
    turn.add(record);
  }
  return result;
}
ssize_t write(int fd, const void* data, size_t size) {
  CallLog* const log = log_of_calls;
  const off_t offset = log ? ::lseek(fd, 0, SEEK_CUR) : 0;
  return shardstep::crash::logged_write(
      fd, data, size, offset, [](int to, const void* from, size_t count, off_t) {
        return next<ssize_t(int, const void*, size_t)>("write")(to, from, count);
      });
}
ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) {
  if (count_call()) return -1;
  return shardstep::crash::logged_write(
      fd, data, size, offset, [](int to, const void* from, size_t count, off_t at) {
        return next<ssize_t(int, const void*, size_t, off_t)>("pwrite")(to, from, count, at);
      });
}
int fsync(int fd) {
  if (count_call()) return -1;
  struct stat status{};
  const bool directory = ::fstat(fd, &status) == 0 && S_ISDIR(status.st_mode);
  if (directory) {
    if (calls.no_directory_sync && calls.index_has_its_name) {
      errno = EIO;
      return -1;
    }
    calls.synced_directories.insert(status.st_ino);
    ::usleep(1000 * calls.directory_sync_ms);
  }
  auto* const real = next<int(int)>("fsync");
  CallLog* const log = log_of_calls;
  LoggedCall record;
  record.kind = directory ? LoggedCall::kSyncDirectory : LoggedCall::kSync;
  record.inode = status.st_ino;
  if (!log || !(directory ? log->is_directory(status.st_ino) : is_in_log_directory(log, fd))) {
    return real(fd);
  }
  return shardstep::crash::logged(log, [&] { return real(fd); }, record);
}
int rename(const char* from, const char* to) noexcept {
  // No signal interrupts these.
  if (!calls.interrupted) count_call();
  const int result = shardstep::crash::logged_names(
      LoggedCall::kRename, from, to, [](const char* a, const char* b) {
        return next<int(const char*, const char*)>("rename")(a, b);
      });
  if (std::string_view(to).ends_with("index.json")) calls.index_has_its_name = true;
  return result;
}
int link(const char* from, const char* to) noexcept {
  return shardstep::crash::logged_names(LoggedCall::kLink, from, to,
                                        [](const char* a, const char* b) {
                                          return next<int(const char*, const char*)>("link")(a, b);
                                        });
}
int unlink(const char* path) noexcept {
  if (!calls.interrupted) count_call();
  return shardstep::crash::logged_names(
      LoggedCall::kUnlink, path, nullptr,
      [](const char* a, const char*) { return next<int(const char*)>("unlink")(a); });
}

// What the library does not use, lest it begins to without the log.
int openat(int directory, const char* path, int flags, ...) {
  std::va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  if ((flags & O_ACCMODE) != O_RDONLY) refuse_for("openat", path, directory);
  return next<int(int, const char*, int, mode_t)>("openat")(directory, path, flags, mode);
}
int openat64(int directory, const char* path, int flags, ...) {
  std::va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  if ((flags & O_ACCMODE) != O_RDONLY) refuse_for("openat64", path, directory);
  return next<int(int, const char*, int, mode_t)>("openat64")(directory, path, flags, mode);
}
int open64(const char* path, int flags, ...) {
  std::va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  if ((flags & O_ACCMODE) != O_RDONLY) refuse_for("open64", path);
  return next<int(const char*, int, mode_t)>("open64")(path, flags, mode);
}
int creat(const char* path, mode_t mode) {
  refuse_for("creat", path);
  return next<int(const char*, mode_t)>("creat")(path, mode);
}
FILE* fopen(const char* path, const char* mode) {
  if (std::string_view(mode).find_first_of("wa+") != std::string_view::npos) {
    refuse_for("fopen", path);
  }
  return next<FILE*(const char*, const char*)>("fopen")(path, mode);
}
FILE* fopen64(const char* path, const char* mode) {
  if (std::string_view(mode).find_first_of("wa+") != std::string_view::npos) {
    refuse_for("fopen64", path);
  }
  return next<FILE*(const char*, const char*)>("fopen64")(path, mode);
}
int remove(const char* path) noexcept {
  refuse_for("remove", path);
  return next<int(const char*)>("remove")(path);
}
int unlinkat(int directory, const char* path, int flags) noexcept {
  refuse_for("unlinkat", path, directory);
  return next<int(int, const char*, int)>("unlinkat")(directory, path, flags);
}
int renameat(int from_directory, const char* from, int to_directory, const char* to) noexcept {
  refuse_for("renameat", from, from_directory);
  refuse_for("renameat", to, to_directory);
  return next<int(int, const char*, int, const char*)>("renameat")(from_directory, from,
                                                                   to_directory, to);
}
int renameat2(int from_directory, const char* from, int to_directory, const char* to,
              unsigned flags) noexcept {
  refuse_for("renameat2", from, from_directory);
  refuse_for("renameat2", to, to_directory);
  return next<int(int, const char*, int, const char*, unsigned)>("renameat2")(
      from_directory, from, to_directory, to, flags);
}
int linkat(int from_directory, const char* from, int to_directory, const char* to,
           int flags) noexcept {
  refuse_for("linkat", to, to_directory);
  return next<int(int, const char*, int, const char*, int)>("linkat")(from_directory, from,
                                                                      to_directory, to, flags);
}
int symlinkat(const char* to, int directory, const char* path) noexcept {
  refuse_for("symlinkat", path, directory);
  return next<int(const char*, int, const char*)>("symlinkat")(to, directory, path);
}
int mkdirat(int directory, const char* path, mode_t mode) noexcept {
  refuse_for("mkdirat", path, directory);
  return next<int(int, const char*, mode_t)>("mkdirat")(directory, path, mode);
}
int symlink(const char* to, const char* path) noexcept {
  refuse_for("symlink", path);
  return next<int(const char*, const char*)>("symlink")(to, path);
}
int mkdir(const char* path, mode_t mode) noexcept {
  refuse_for("mkdir", path);
  return next<int(const char*, mode_t)>("mkdir")(path, mode);
}
int rmdir(const char* path) noexcept {
  refuse_for("rmdir", path);
  return next<int(const char*)>("rmdir")(path);
}
int truncate(const char* path, off_t size) noexcept {
  refuse_for("truncate", path);
  return next<int(const char*, off_t)>("truncate")(path, size);
}
int ftruncate(int fd, off_t size) noexcept {
  struct stat status{};
  const bool changes = ::fstat(fd, &status) != 0 || status.st_size != size;
  if (changes) refuse_for("ftruncate", fd);
  return next<int(int, off_t)>("ftruncate")(fd, size);
}
ssize_t writev(int fd, const struct iovec* parts, int count) {
  refuse_for("writev", fd);
  return next<ssize_t(int, const struct iovec*, int)>("writev")(fd, parts, count);
}
ssize_t pwritev(int fd, const struct iovec* parts, int count, off_t offset) {
  refuse_for("pwritev", fd);
  return next<ssize_t(int, const struct iovec*, int, off_t)>("pwritev")(fd, parts, count, offset);
}
ssize_t pwrite64(int fd, const void* data, size_t size, off64_t offset) {
  refuse_for("pwrite64", fd);
  return next<ssize_t(int, const void*, size_t, off64_t)>("pwrite64")(fd, data, size, offset);
}
ssize_t copy_file_range(int from, off_t* from_at, int to, off_t* to_at, size_t size,
                        unsigned flags) {
  refuse_for("copy_file_range", to);
  return next<ssize_t(int, off_t*, int, off_t*, size_t, unsigned)>("copy_file_range")(
      from, from_at, to, to_at, size, flags);
}
ssize_t sendfile(int to, int from, off_t* at, size_t size) noexcept {
  refuse_for("sendfile", to);
  return next<ssize_t(int, int, off_t*, size_t)>("sendfile")(to, from, at, size);
}
}

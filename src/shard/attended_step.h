#pragma once

// Inside a Join: in whose step() the ranks that have joined are. They take part in its meetings
// until all ranks step, so a meeting of another optimizer would wait for them in vain.
// Thread-safe, since ranks may be threads. Nothing here communicates.

#include "shardstep/process_group.h"

namespace shardstep::detail {

class AttendedStep {
 public:
  explicit AttendedStep(ProcessGroupPtr group) : group_(std::move(group)) {}
  ~AttendedStep() { end(); }
  AttendedStep(const AttendedStep&) = delete;
  AttendedStep& operator=(const AttendedStep&) = delete;

  // Throws if they are in the step of another optimizer of this rank's group.
  void check_no_other() const;
  void begin();
  void end();

 private:
  ProcessGroupPtr group_;
};

}  // namespace shardstep::detail

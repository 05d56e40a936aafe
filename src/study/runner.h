// Runs as child processes, some at a time: one that crashes leaves the others, and whatever ends
// this process ends them gently, so that all can go on later.
#pragma once

#include <functional>

#include "study/study.h"

namespace horner::study {

enum class Status { waiting, running, finished, failed, stopped };

struct RunState {
  Status status = Status::waiting;
  bool here = false;  // begun by this process, not found finished
  int64_t step = 0;
  double loss = 0, tokens_per_second = 0, seconds_left = 0;
  std::string why = "";  // of one that failed: its last words
};

struct Runner {
  std::filesystem::path program;  // horner itself
  size_t jobs = 1;
  std::function<bool()> stop = [] { return false; };
  std::function<void(const std::vector<RunState>&)> show = [](const std::vector<RunState>&) {};
  std::function<void(const Run&)> finished = [](const Run&) {};  // when one ends well
};

// Until all have ended or stop() says so. Finished runs are left as they are. Throws, before
// anything runs, where a folder holds a run with other settings.
std::vector<RunState> run_all(const std::vector<Run>&, const Runner&);

// Whether the run's folder says that it is done.
bool is_finished(const Run&);

}  // namespace horner::study

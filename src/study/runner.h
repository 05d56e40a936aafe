// Runs as child processes, several at a time: a crash does not affect the other runs, and whatever
// ends this process interrupts them with a checkpoint, so that all can be resumed.
#pragma once

#include <functional>

#include "study/study.h"

namespace horner::study {

enum class Status { waiting, running, finished, failed, stopped, given_up };

struct RunState {
  Status status = Status::waiting;
  bool here = false;             // started by this process
  int64_t step = 0, judged = 0;  // the latest; the one at which it was last judged
  double loss = 0, tokens_per_second = 0, seconds_left = 0;
  std::string why = "";  // why it failed: the last line of its log; why it was given up
};

struct Runner {
  std::filesystem::path program;  // horner itself
  size_t jobs = 1;
  std::function<bool()> stop = [] { return false; };
  std::function<void(const std::vector<RunState>&)> show = [](const std::vector<RunState>&) {};
  std::function<void(const Run&)> finished = [](const Run&) {};  // called when a run has finished
  // Why to give up a run that is running, or "".
  std::function<std::string(const Run&)> hopeless = [](const Run&) { return ""; };
};

// Throws if a run cannot begin in its folder, because that holds a run with other settings or is in
// use; waits for runs of a killed study, which are writing their checkpoints. Writes nothing.
void check_runs(const std::vector<Run>&);

// Returns when all runs have ended or stop() returns true. Skips finished runs.
std::vector<RunState> run_all(const std::vector<Run>&, const Runner&);

// Whether the run's folder has the result of all its steps.
bool is_finished(const Run&);

}  // namespace horner::study

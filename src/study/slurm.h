// A study as an array job of Slurm: each task is one 'horner study' on the shared folder.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace horner::study {

struct SlurmJob {
  std::string name;                    // of the study
  std::vector<std::string> words;      // the command of a task
  std::string directory, log;          // where it runs; the pattern of its log files
  int64_t array = 1;                   // tasks
  std::string time, partition;         // "": the cluster's default
  int64_t gpus = 0, cpus = 0;          // of each task; 0: the cluster's default
  std::vector<std::string> more = {};  // further options of sbatch
};

// The script for sbatch. A task that is asked to end before its time limit writes the checkpoints
// of its runs, releases them and puts itself back into the queue.
std::string slurm_script(const SlurmJob&);

// A word as a shell reads it.
std::string shell_quoted(const std::string&);

// Submits the file and returns the number of the job. Throws with what sbatch said.
std::string submit(const std::string& script);

}  // namespace horner::study

// Checkpoints notice every changed byte; the checksum is CRC-32C; locks that other machines do not
// see are known.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <random>

#include "core/check.h"
#include "core/crc32c.h"
#include "files/checksums.h"
#include "files/lock.h"
#include "nn/checkpoint.h"
#include "small_llama.h"
#include "train/checkpoint.h"

namespace horner {
namespace {

namespace fs = std::filesystem;

// Values of RFC 3720 and of the catalogue of CRCs, at lengths that end within a word.
TEST(Crc32c, KnownValues) {
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  std::string up;
  for (int i = 0; i < 32; ++i) up += char(i);
  EXPECT_EQ(crc32c(up), 0x46dd794eu);
}

struct Run : testing::Test {
  fs::path run = fs::temp_directory_path() / ("horner_run_" + std::to_string(getpid()));
  Run() { fs::remove_all(run); }
  ~Run() override { fs::remove_all(run); }
};

nn::Model small_model() {
  return nn::random_model(nn::model_config(small_llama()), 3);
}

// Every file in turn, so that the small ones are not missed.
TEST_F(Run, EveryChangedByteOfACheckpointIsNoticed) {
  nn::Model m = small_model();
  const train::Optimizer o = train::make_optimizer(m, at::kCPU);
  fs::create_directories(run);
  train::save_checkpoint(run, m, o, {.step = 5, .losses = {{1.5, 0.1}}}, 2);
  train::save_checkpoint(run, m, o, {.step = 7}, 2);
  const fs::path last = run / "checkpoint-00000007";
  std::vector<fs::path> all;
  for (const auto& entry : fs::directory_iterator(last)) all.push_back(entry.path());
  ASSERT_EQ(all.size(), 5u);  // config, weights, optimizer, position, checksums
  std::mt19937 random(7);
  for (int i = 0; i < 1000; ++i) {
    const fs::path& file = all[size_t(i) % all.size()];
    const std::string good = contents(file);
    std::string bad = good;
    const size_t at = random() % bad.size();
    const char by = char(1 + random() % 255);
    bad[at] = char(bad[at] ^ by);
    put(file, bad);
    const train::Found found = train::find_checkpoint(run);
    const std::string where = file.filename().string();
    ASSERT_EQ(found.damaged.size(), 1u) << where << " at " << at << " by " << int(by);
    EXPECT_EQ(found.damaged[0].why, where + " has changed");
    EXPECT_TRUE(found.whole == run / "checkpoint-00000005");
    if (where.starts_with("model") || where == "config.json" || where == files::kChecksums) {
      EXPECT_THROW(nn::load_model(last), Error) << where << " at " << at;
    }
    put(file, good);
  }
  EXPECT_TRUE(train::find_checkpoint(run).whole == last);
  nn::load_model(last);
}

TEST_F(Run, CutAndMissingFilesAreNoticed) {
  nn::Model m = small_model();
  fs::create_directories(run);
  train::save_checkpoint(run, m, train::make_optimizer(m, at::kCPU), {.step = 7}, 2);
  const fs::path folder = run / "checkpoint-00000007";
  put(folder / "tokenizer.json", "{}");  // added by hand: not ours to judge
  EXPECT_EQ(files::damage_of(folder), "");
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().filename() != "tokenizer.json")
      names.push_back(entry.path().filename().string());
  for (const std::string& name : names) {
    const std::string good = contents(folder / name);
    put(folder / name, good + "\n");
    EXPECT_EQ(files::damage_of(folder), name + " has changed");
    for (const size_t size : {size_t(0), good.size() / 2, good.size() - 1}) {
      put(folder / name, good.substr(0, size));
      EXPECT_EQ(files::damage_of(folder), name + " has changed") << size;
    }
    fs::remove(folder / name);
    EXPECT_EQ(files::damage_of(folder), name + " is missing");
    put(folder / name, good);
  }
  // The list without one of its lines, which would leave that file unchecked.
  const std::string list = contents(folder / files::kChecksums);
  put(folder / files::kChecksums, list.substr(list.find('\n') + 1));
  EXPECT_EQ(files::damage_of(folder), "checksums.txt has changed");
}

TEST(Locks, OfSomeMountsAreLocal) {
  const std::string mounts =
      "29 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
      "40 29 0:41 / /home rw shared:9 - nfs4 server:/home rw,vers=4.2,local_lock=none\n"
      "41 29 0:42 / /old rw - nfs server:/old rw,vers=3,nolock,local_lock=all\n"
      "42 29 0:43 / /half rw shared:3 - nfs4 server:/half rw,local_lock=flock,addr=10.0.0.1\n";
  EXPECT_FALSE(files::has_local_locks(mounts, 8, 1));
  EXPECT_FALSE(files::has_local_locks(mounts, 0, 41));
  EXPECT_TRUE(files::has_local_locks(mounts, 0, 42));
  EXPECT_TRUE(files::has_local_locks(mounts, 0, 43));
  EXPECT_FALSE(files::has_local_locks(mounts, 0, 4));
}

TEST_F(Run, TheLockLeavesNothing) {
  {
    const files::FolderLock lock(run / "a" / "b");
    EXPECT_EQ(lock.warning(), "");
    EXPECT_THROW(files::FolderLock(run / "a" / "b"), Error);  // another description of the file
    EXPECT_NE(files::owner_of(run / "a" / "b").find("process " + std::to_string(getpid())),
              std::string::npos);
  }
  EXPECT_FALSE(fs::exists(run));
  EXPECT_EQ(files::owner_of(run), "");
  {
    const files::FolderLock lock(run / "a");
    put(run / "a" / "kept", "x");
  }
  EXPECT_EQ(contents(run / "a" / "kept"), "x");
  EXPECT_FALSE(fs::exists(run / "a" / ".lock"));
}

}  // namespace
}  // namespace horner

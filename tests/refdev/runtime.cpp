#include "runtime.h"

#include <Python.h>

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>

namespace refdev {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kMostDevices = 2;
constexpr size_t kArena = size_t(1) << 36; // of addresses; only the pages that are written take memory
constexpr size_t kSmallest = 512;

std::array<std::atomic<int64_t>, kCounters> counts{};
thread_local int device_of_thread = 0;
thread_local std::array<int64_t, kMostDevices> stream_of_thread{};

// One memory file a device, mapped twice: the device's addresses without access, the alias with it.
struct Arena {
  char* device = nullptr;
  char* host = nullptr;
  size_t used = 0;
  MemoryUse use{0, 0};
  std::map<size_t, std::vector<void*>> free_blocks;
  std::unordered_map<void*, size_t> sizes;
  std::mutex mutex;

  Arena() {
    const int file = memfd_create("refdev", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, kArena) == 0, "refdev: the system gave no memory file");
    device = map(file, PROT_NONE);
    host = map(file, PROT_READ | PROT_WRITE);
    close(file);
  }

  static char* map(int file, int access) {
    void* address = mmap(nullptr, kArena, access, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(address != MAP_FAILED, "refdev: the system gave no addresses");
    return static_cast<char*>(address);
  }

  bool contains(const void* address) const { return address >= device && address < device + kArena; }
};

// Everything that threads may still use while the process ends is never destroyed.
Arena& arena(int device) {
  static auto* arenas = new std::array<std::unique_ptr<Arena>, kMostDevices>();
  static auto* mutex = new std::mutex();
  std::lock_guard<std::mutex> lock(*mutex);
  auto& chosen = (*arenas)[device];
  if (!chosen) {
    chosen = std::make_unique<Arena>();
  }
  return *chosen;
}

size_t rounded(size_t bytes) {
  size_t size = kSmallest;
  while (size < bytes) {
    size *= 2;
  }
  return size;
}

struct Pinned {
  std::mutex mutex;
  std::map<const char*, size_t> blocks;
};

Pinned& pinned() {
  static auto* blocks = new Pinned();
  return *blocks;
}

struct Fault {
  std::mutex mutex;
  std::string message;
  std::atomic<bool> broken{false};
};

Fault& fault(int device) {
  static auto* faults = new std::array<Fault, kMostDevices>();
  return (*faults)[device];
}

} // namespace

void count(Counter counter) {
  counts[counter]++;
}

std::vector<int64_t> counters() {
  return {counts.begin(), counts.end()};
}

int device_count() {
  static const int number = [] {
    const char* text = std::getenv("REFDEV_DEVICES");
    const int wanted = text ? std::atoi(text) : 1;
    TORCH_CHECK(wanted >= 1 && wanted <= kMostDevices, "REFDEV_DEVICES must be 1 or 2, not ", text);
    return wanted;
  }();
  return number;
}

int current_device() {
  return device_of_thread;
}

int exchange_device(int device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "refdev error: invalid device ordinal ", device);
  return std::exchange(device_of_thread, device);
}

void* allocate(size_t bytes, int device) {
  if (bytes == 0) {
    return nullptr;
  }
  count(kAllocations);
  Arena& memory = arena(device);
  std::lock_guard<std::mutex> lock(memory.mutex);
  const size_t size = rounded(bytes);
  auto& blocks = memory.free_blocks[size];
  void* address = nullptr;
  if (blocks.empty()) {
    address = memory.device + memory.used;
    memory.used += size;
    memory.sizes[address] = size;
  } else {
    address = blocks.back();
    blocks.pop_back();
  }
  memory.use.now += size;
  memory.use.peak = std::max(memory.use.peak, memory.use.now);
  return address;
}

void release(void* address) {
  if (address == nullptr) {
    return;
  }
  Arena& memory = arena(device_of(address));
  std::lock_guard<std::mutex> lock(memory.mutex);
  const size_t size = memory.sizes.at(address);
  memory.free_blocks[size].push_back(address);
  memory.use.now -= size;
}

int device_of(const void* address) {
  for (int device = 0; device < device_count(); device++) {
    if (arena(device).contains(address)) {
      return device;
    }
  }
  return -1;
}

char* host_alias(const void* address) {
  if (address == nullptr) {
    return nullptr;
  }
  const Arena& memory = arena(device_of(address));
  return memory.host + (static_cast<const char*>(address) - memory.device);
}

MemoryUse& memory_use(int device) {
  return arena(device).use;
}

void* allocate_pinned(size_t bytes) {
  if (bytes == 0) {
    return nullptr;
  }
  auto* address = static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
  std::lock_guard<std::mutex> lock(pinned().mutex);
  pinned().blocks[address] = bytes;
  return address;
}

void release_pinned(void* address) {
  {
    std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned().blocks.erase(static_cast<char*>(address));
  }
  std::free(address);
}

bool is_pinned(const void* address) {
  const auto* bytes = static_cast<const char*>(address);
  std::lock_guard<std::mutex> lock(pinned().mutex);
  auto after = pinned().blocks.upper_bound(bytes);
  if (after == pinned().blocks.begin()) {
    return false;
  }
  const auto& [start, size] = *std::prev(after);
  return bytes < start + size;
}

// Streams and events

struct Mark {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  Clock::time_point when;
  int device = 0;

  void finish() {
    std::lock_guard<std::mutex> lock(mutex);
    done = true;
    when = Clock::now();
    changed.notify_all();
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return done; });
  }

  bool wait_until(Clock::time_point end) {
    std::unique_lock<std::mutex> lock(mutex);
    return changed.wait_until(lock, end, [this] { return done; });
  }
};

struct Queue {
  const int device;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> tasks;
  bool stopping = false;
  std::thread thread;

  explicit Queue(int device) : device(device), thread([this] { run(); }) {}

  void push(Task task) {
    std::lock_guard<std::mutex> lock(mutex);
    tasks.push_back(std::move(task));
    changed.notify_one();
  }

  void run() {
    device_of_thread = device;
    while (true) {
      Task task;
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return stopping || !tasks.empty(); });
        if (tasks.empty()) {
          return;
        }
        task = std::move(tasks.front());
        tasks.pop_front();
      }
      task();
    }
  }

  void stop() {
    std::lock_guard<std::mutex> lock(mutex);
    stopping = true;
    changed.notify_one();
  }
};

namespace {

struct Streams {
  std::mutex mutex;
  std::array<std::map<int64_t, std::unique_ptr<Queue>>, kMostDevices> queues;
  std::array<int64_t, kMostDevices> newest{};
};

Streams& streams() {
  static auto* all = new Streams();
  return *all;
}

std::vector<Queue*> queues_of(int device) {
  std::lock_guard<std::mutex> lock(streams().mutex);
  std::vector<Queue*> queues;
  for (auto& [id, queue] : streams().queues[device]) {
    queues.push_back(queue.get());
  }
  return queues;
}

} // namespace

Queue& stream(int device, int64_t id) {
  std::lock_guard<std::mutex> lock(streams().mutex);
  auto& queue = streams().queues[device][id];
  if (!queue) {
    queue = std::make_unique<Queue>(device);
  }
  return *queue;
}

int64_t new_stream(int device) {
  std::lock_guard<std::mutex> lock(streams().mutex);
  constexpr int64_t kPool = 32; // then the same ones again, as other devices have it
  return streams().newest[device]++ % kPool + 1;
}

int64_t current_stream(int device) {
  return stream_of_thread[device];
}

int64_t exchange_stream(int device, int64_t id) {
  return std::exchange(stream_of_thread[device], id);
}

Queue& current_queue() {
  return stream(device_of_thread, stream_of_thread[device_of_thread]);
}

void launch(Queue& queue, Task task) {
  raise_if_broken(queue.device);
  count(kLaunches);
  queue.push([device = queue.device, task = std::move(task)] {
    if (fault(device).broken) {
      return;
    }
    try {
      task();
    } catch (const c10::Error& error) {
      break_device(device, error.what_without_backtrace());
    } catch (const std::exception& error) {
      break_device(device, error.what());
    }
  });
}

MarkPtr record(Queue& queue) {
  auto mark = std::make_shared<Mark>();
  mark->device = queue.device;
  queue.push([mark] { mark->finish(); });
  return mark;
}

void wait_in_stream(Queue& queue, MarkPtr mark) {
  queue.push([mark = std::move(mark)] { mark->wait(); });
}

bool is_done(const MarkPtr& mark) {
  std::lock_guard<std::mutex> lock(mark->mutex);
  return mark->done;
}

double milliseconds(const MarkPtr& start, const MarkPtr& end) {
  return std::chrono::duration<double, std::milli>(end->when - start->when).count();
}

void wait_on_host(const MarkPtr& mark) {
  count(kSynchronizations);
  {
    WithoutPython waiting;
    mark->wait();
  }
  raise_if_broken(mark->device);
}

void synchronize(Queue& queue) {
  wait_on_host(record(queue));
}

void synchronize_device(int device) {
  count(kSynchronizations);
  {
    WithoutPython waiting;
    for (Queue* queue : queues_of(device)) {
      record(*queue)->wait();
    }
  }
  raise_if_broken(device);
}

void break_device(int device, const std::string& message) {
  std::lock_guard<std::mutex> lock(fault(device).mutex);
  if (!fault(device).broken) {
    fault(device).message = message;
    fault(device).broken = true;
  }
}

void raise_if_broken(int device) {
  if (!fault(device).broken) {
    return;
  }
  std::lock_guard<std::mutex> lock(fault(device).mutex);
  const std::string message = "refdev error: " + fault(device).message +
      "\nErrors of this device may be reported by a later call, so the stack trace below may be wrong.";
  throw c10::AcceleratorError({__func__, __FILE__, uint32_t(__LINE__)}, 1, message);
}

void shutdown(double seconds) {
  WithoutPython waiting;
  const auto end = Clock::now() + std::chrono::milliseconds(int64_t(seconds * 1000));
  for (int device = 0; device < kMostDevices; device++) {
    for (Queue* queue : queues_of(device)) {
      const bool drained = record(*queue)->wait_until(end);
      queue->stop();
      if (drained) {
        queue->thread.join();
      } else {
        queue->thread.detach(); // it waits for a collective that never ends
      }
    }
  }
}

WithoutPython::WithoutPython() {
  if (Py_IsInitialized() && PyGILState_Check()) {
    state_ = PyEval_SaveThread();
  }
}

WithoutPython::~WithoutPython() {
  if (state_ != nullptr) {
    PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
  }
}

} // namespace refdev

// The hardware of the reference accelerator: memory that the host cannot read, streams, events and what was counted.
//
// Nothing here knows tensors. A stream is a thread that runs the tasks of its queue in order; the host goes on meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace refdev {

// What a device's driver counts. device.py has the names, in this order.
enum Counter { kLaunches, kHostReads, kCopiesToHost, kCopiesToDevice, kSynchronizations, kAllocations, kCounters };
void count(Counter counter);
std::vector<int64_t> counters();

int device_count();
int current_device();
int exchange_device(int device); // returns the one before

// Memory of a device. Its address is valid, and any access to it by the host is a segmentation fault.
void* allocate(size_t bytes, int device);
void release(void* address);
char* host_alias(const void* address); // where the device's own threads read and write the same bytes
int device_of(const void* address);    // -1 where the address is no device's
struct MemoryUse {
  int64_t now, peak;
};
MemoryUse& memory_use(int device);

// Host memory that copies without waiting may use.
void* allocate_pinned(size_t bytes);
void release_pinned(void* address);
bool is_pinned(const void* address);

using Task = std::function<void()>;
struct Mark; // a point in a stream's queue
using MarkPtr = std::shared_ptr<Mark>;
struct Queue; // a stream

Queue& stream(int device, int64_t id); // id 0 is the default stream
int64_t new_stream(int device);
int64_t current_stream(int device);
int64_t exchange_stream(int device, int64_t id);
Queue& current_queue();

void launch(Queue& queue, Task task); // returns at once; raises the device's error
MarkPtr record(Queue& queue);
void wait_in_stream(Queue& queue, MarkPtr mark);
bool is_done(const MarkPtr& mark);
double milliseconds(const MarkPtr& start, const MarkPtr& end);

// The host waits: these count a synchronization, release Python's lock and raise the device's error.
void wait_on_host(const MarkPtr& mark);
void synchronize(Queue& queue);
void synchronize_device(int device);

// An error of a task stays: each later call that needs the device raises it, and no later task runs.
void break_device(int device, const std::string& message);
void raise_if_broken(int device);

// Before the process ends: run what is queued, and join the threads that get there within the time.
void shutdown(double seconds);

// Releases Python's lock, where this thread has it, while the host waits.
class WithoutPython {
 public:
  WithoutPython();
  ~WithoutPython();

 private:
  void* state_ = nullptr;
};

} // namespace refdev

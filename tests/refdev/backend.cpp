// "refccl": collectives of the device over gloo, each in its turn on a stream of the group's own, as NCCL has them.
//
// A call returns at once. wait() lets the current stream wait, not the host. A watchdog ends the process, in NCCL's
// words, where a collective takes longer than the group's timeout, or a peer is gone.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <c10/core/StreamGuard.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <mutex>
#include <numeric>
#include <thread>

#include "device.h"

namespace refdev {
namespace {

using at::Tensor;
using c10d::OpType;
using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr Milliseconds kPoll{50};
constexpr Milliseconds kDump{3000}; // between the watchdog's words and the end of the process
constexpr int64_t kFirstStream = 1000;

// What a collective does on the device's thread: begin it over gloo, and put the result where it belongs.
struct Step {
  std::function<WorkPtr()> begin;
  std::function<void()> finish = [] {};
};

Tensors host_views(const Tensors& tensors) {
  Tensors views;
  for (const Tensor& tensor : tensors) {
    views.push_back(host_view(tensor));
  }
  return views;
}

int64_t elements(const Tensors& tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), int64_t(0), [](int64_t sum, const Tensor& tensor) {
    return sum + tensor.numel();
  });
}

class RefWork final : public c10d::Work {
 public:
  RefWork(int rank, OpType type, Queue& queue, c10::Stream stream, Tensors outputs, uint64_t sequence)
      : Work(rank, type), end_(record(queue)), outputs_(std::move(outputs)), sequence_(sequence) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream.device()});
    c10::StreamGuard guard(stream);
    future_->markCompleted(c10::IValue(outputs_));
  }

  bool isCompleted() override { return is_done(end_); }
  std::vector<Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return sequence_; }
  void synchronize() override {
    wait_in_stream(current_queue(), end_);
    if (opType_ == OpType::BARRIER) {
      refdev::synchronize(current_queue());
    }
  }

  // With a time of its own the host waits, as for NCCL.
  bool wait(Milliseconds timeout) override {
    const auto end = Clock::now() + timeout;
    while (timeout != kNoTimeout && !is_done(end_)) {
      if (Clock::now() > end) {
        C10_THROW_ERROR(DistBackendError, c10::str("Work ran time out after ", timeout.count(), " milliseconds."));
      }
      WithoutPython waiting;
      std::this_thread::sleep_for(Milliseconds(1));
    }
    synchronize();
    return true;
  }

  const MarkPtr& end() const { return end_; }

 private:
  MarkPtr end_;
  Tensors outputs_;
  uint64_t sequence_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// What the group's stream and its watchdog share.
struct Health {
  std::mutex mutex;
  std::string error;
  std::atomic<bool> over{false}; // destroyed or aborted

  void report(const std::string& message) {
    std::lock_guard<std::mutex> lock(mutex);
    if (error.empty()) {
      error = message;
    }
  }
  std::string reported() {
    std::lock_guard<std::mutex> lock(mutex);
    return error;
  }
};

class RefBackend final : public c10d::Backend {
 public:
  RefBackend(c10::intrusive_ptr<Backend> gloo, int rank, int size, Milliseconds timeout)
      : Backend(rank, size), gloo_(std::move(gloo)), health_(std::make_shared<Health>()),
        options_(c10::make_intrusive<Options>("refccl", timeout)) {
    static std::atomic<int64_t> groups{kFirstStream};
    stream_id_ = groups++;
    watchdog_ = std::thread([this] { watch(); });
  }

  ~RefBackend() override {
    shutdown();
  }

  const std::string getBackendName() const override { return "refccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void abort() override { shutdown(); }
  void shutdown() override {
    health_->over = true;
    WithoutPython waiting;
    std::lock_guard<std::mutex> lock(joining_);
    if (watchdog_.joinable()) {
      watchdog_.join();
    }
  }

  void startCoalescing() override { coalescing_ = true; }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    std::vector<Step> steps = std::exchange(coalesced_, {});
    return queue(OpType::COALESCED, std::exchange(coalesced_tensors_, {}), {}, std::move(steps));
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return queue(OpType::ALLREDUCE, tensors, tensors, {sum_step(tensors, options)});
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    std::vector<Step> steps;
    for (const Tensor& tensor : tensors) {
      steps.push_back(sum_step({tensor}, options));
    }
    return queue(OpType::ALLREDUCE_COALESCED, tensors, tensors, std::move(steps));
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto inner = options;
    const bool averages = without_average(inner.reduceOp);
    Step step{[gloo = gloo_, views = host_views(tensors), inner]() mutable { return gloo->reduce(views, inner); }};
    if (averages && options.rootRank == rank_) {
      step.finish = [view = host_view(tensors[0]), size = size_]() mutable { view.div_(size); };
    }
    return queue(OpType::REDUCE, tensors, tensors, {step});
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Step step{[gloo = gloo_, to = host_views(tensors), options]() mutable { return gloo->broadcast(to, options); }};
    return queue(OpType::BROADCAST, tensors, tensors, {step});
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> targets{host_views(outputs.at(0))};
    Step step{[gloo = gloo_, targets, views = host_views(inputs), options]() mutable {
      return gloo->allgather(targets, views, options);
    }};
    return queue(OpType::ALLGATHER, inputs, outputs[0], {step});
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return queue(OpType::_ALLGATHER_BASE, {input}, {output}, {gather_step(output, input, options)});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    std::vector<Step> steps;
    for (size_t index = 0; index < inputs.size(); index++) {
      steps.push_back(gather_step(outputs[index], inputs[index], options));
    }
    return queue(OpType::COALESCED, inputs, outputs, std::move(steps));
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    std::vector<Tensors> targets;
    for (const Tensors& list : outputs) {
      targets.push_back(host_views(list));
    }
    Step step{[gloo = gloo_, targets, views = host_views(inputs), options]() mutable {
      return gloo->gather(targets, views, options);
    }};
    return queue(OpType::GATHER, inputs, outputs.empty() ? Tensors{} : outputs[0], {step});
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    std::vector<Tensors> sources;
    for (const Tensors& list : inputs) {
      sources.push_back(host_views(list));
    }
    Step step{[gloo = gloo_, sources, views = host_views(outputs), options]() mutable {
      return gloo->scatter(views, sources, options);
    }};
    return queue(OpType::SCATTER, inputs.empty() ? Tensors{} : inputs[0], outputs, {step});
  }

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return queue(OpType::_REDUCE_SCATTER_BASE, {input}, {output}, {scatter_step(output, input, options)});
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& received, std::vector<int64_t>& sent,
                        const c10d::AllToAllOptions& options) override {
    Step step{[gloo = gloo_, to = host_view(output), from = host_view(input), received, sent, options]() mutable {
      return gloo->alltoall_base(to, from, received, sent, options);
    }};
    return queue(OpType::ALLTOALL_BASE, {input}, {output}, {step});
  }
  WorkPtr send(Tensors& tensors, int target, int) override { // NCCL has no tags
    Step step{[gloo = gloo_, views = host_views(tensors), target]() mutable { return gloo->send(views, target, 0); }};
    return queue(OpType::SEND, tensors, {}, {step});
  }
  WorkPtr recv(Tensors& tensors, int source, int) override {
    Step step{[gloo = gloo_, views = host_views(tensors), source]() mutable { return gloo->recv(views, source, 0); }};
    return queue(OpType::RECV, tensors, tensors, {step});
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return queue(OpType::BARRIER, {}, {}, {Step{[gloo = gloo_, options] { return gloo->barrier(options); }}});
  }

 private:
  static bool without_average(c10d::ReduceOp& operation) {
    if (operation != c10d::ReduceOp::AVG) {
      return false;
    }
    operation = c10d::ReduceOp::SUM;
    return true;
  }
  Step sum_step(const Tensors& tensors, const c10d::AllreduceOptions& options) {
    auto inner = options;
    const bool averages = without_average(inner.reduceOp);
    Tensors views = host_views(tensors);
    return {
        [gloo = gloo_, views, inner]() mutable { return gloo->allreduce(views, inner); },
        [views, averages, size = size_] {
          for (const Tensor& view : views) {
            if (averages) {
              view.div_(size);
            }
          }
        }};
  }

  Step gather_step(const Tensor& output, const Tensor& input, const c10d::AllgatherOptions& options) {
    return {[gloo = gloo_, to = host_view(output), from = host_view(input), options]() mutable {
      return gloo->_allgather_base(to, from, options);
    }};
  }

  // gloo sums the whole, and this rank keeps its part.
  Step scatter_step(const Tensor& output, const Tensor& input, const c10d::ReduceScatterOptions& options) {
    c10d::AllreduceOptions inner;
    inner.reduceOp = options.reduceOp;
    const bool averages = without_average(inner.reduceOp);
    auto whole = std::make_shared<Tensors>();
    return {
        [gloo = gloo_, from = host_view(input), whole, inner] {
          *whole = {from.reshape({-1}).clone()};
          return gloo->allreduce(*whole, inner);
        },
        [to = host_view(output), whole, averages, rank = rank_, size = size_] {
          const Tensor part = whole->at(0).narrow(0, rank * to.numel(), to.numel());
          to.copy_(part.view(to.sizes()));
          if (averages) {
            to.div_(size);
          }
        }};
  }

  WorkPtr queue(OpType type, Tensors inputs, Tensors outputs, std::vector<Step> steps) {
    if (!health_->reported().empty()) {
      C10_THROW_ERROR(DistBackendError, c10::str("NCCL communicator was aborted on rank ", rank_, "."));
    }
    for (const Tensor& tensor : inputs) {
      TORCH_CHECK_WITH(ValueError, tensor.is_contiguous(), "Tensors must be contiguous");
    }
    if (coalescing_) {
      coalesced_.insert(coalesced_.end(), steps.begin(), steps.end());
      coalesced_tensors_.insert(coalesced_tensors_.end(), inputs.begin(), inputs.end());
      return c10::make_intrusive<c10d::Work>(rank_, type);
    }
    const Tensors& tensors = inputs.empty() ? outputs : inputs;
    const int device = tensors.empty() ? current_device() : tensors[0].device().index();
    Queue& own = stream(device, stream_id_);
    wait_in_stream(own, record(current_queue()));
    launch(own, [steps = std::move(steps), health = health_] { run(steps, *health); });
    const c10::Stream as_torch(c10::Stream::UNSAFE, c10::Device(kDevice, c10::DeviceIndex(device)), stream_id_);
    auto work = c10::make_intrusive<RefWork>(rank_, type, own, as_torch, outputs, ++sequence_);
    std::lock_guard<std::mutex> lock(pending_mutex_);
    pending_.push_back({work->end(), Clock::now(), describe(type, inputs, outputs)});
    return work;
  }

  static void run(const std::vector<Step>& steps, Health& health) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    try {
      std::vector<WorkPtr> begun;
      for (const Step& step : steps) {
        begun.push_back(step.begin());
      }
      for (const WorkPtr& work : begun) {
        work->wait();
      }
      for (const Step& step : steps) {
        step.finish();
      }
    } catch (const std::exception& error) {
      health.report(error.what());
      while (!health.over) { // a broken communicator ends no collective
        std::this_thread::sleep_for(kPoll);
      }
    }
  }

  std::string describe(OpType type, const Tensors& inputs, const Tensors& outputs) const {
    return c10::str("WorkNCCL(SeqNum=", sequence_, ", OpType=", c10d::opTypeToString(type),
                    ", NumelIn=", elements(inputs), ", NumelOut=", elements(outputs),
                    ", Timeout(ms)=", options_->timeout.count(), ")");
  }

  // Ends the process, as NCCL's watchdog does.
  void watch() {
    while (!health_->over) {
      std::this_thread::sleep_for(kPoll);
      const std::string error = find_error();
      if (error.empty() || health_->over) {
        continue;
      }
      health_->report(error);
      std::fprintf(stderr, "[rank%d]: [PG ID %s Rank %d] %s\n", rank_, getGroupUid().c_str(), rank_, error.c_str());
      const auto end = Clock::now() + kDump;
      while (Clock::now() < end && !health_->over) {
        std::this_thread::sleep_for(kPoll);
      }
      if (!health_->over) {
        std::fprintf(stderr, "[rank%d]: To avoid data inconsistency, we are taking the entire process down.\n", rank_);
        std::abort();
      }
    }
  }

  std::string find_error() {
    const std::string broken = health_->reported();
    if (!broken.empty()) {
      return "Process group watchdog thread terminated with exception: NCCL error: remote process exited or there "
             "was a network error, ncclRemoteError: A call failed possibly due to a network error or a remote "
             "process exiting prematurely. Last error: " + broken;
    }
    std::lock_guard<std::mutex> lock(pending_mutex_);
    while (!pending_.empty() && is_done(pending_.front().end)) {
      pending_.pop_front();
    }
    if (pending_.empty()) {
      return "";
    }
    const auto elapsed = std::chrono::duration_cast<Milliseconds>(Clock::now() - pending_.front().start);
    if (elapsed < options_->timeout) {
      return "";
    }
    return c10::str("Watchdog caught collective operation timeout: ", pending_.front().description, " ran for ",
                    elapsed.count(), " milliseconds before timing out.");
  }

  struct Pending {
    MarkPtr end;
    Clock::time_point start;
    std::string description;
  };

  c10::intrusive_ptr<Backend> gloo_;
  std::shared_ptr<Health> health_;
  c10::intrusive_ptr<Options> options_;
  int64_t stream_id_ = 0;
  uint64_t sequence_ = 0;
  bool coalescing_ = false;
  std::vector<Step> coalesced_;
  Tensors coalesced_tensors_;
  std::mutex pending_mutex_;
  std::list<Pending> pending_;
  std::mutex joining_;
  std::thread watchdog_;
};

// Kernels that take as long as the host wants, at most some seconds.
struct Gate {
  std::mutex mutex;
  std::condition_variable opened;
  int64_t closed = 0;
  int64_t open = 0;
};

Gate& gate() {
  static auto* only = new Gate();
  return *only;
}

void occupy(double seconds) {
  std::unique_lock<std::mutex> lock(gate().mutex);
  launch(current_queue(), [ticket = ++gate().closed, seconds] {
    std::unique_lock<std::mutex> lock(gate().mutex);
    gate().opened.wait_for(lock, std::chrono::duration<double>(seconds), [ticket] { return gate().open >= ticket; });
  });
}

void release_all() {
  std::lock_guard<std::mutex> lock(gate().mutex);
  gate().open = gate().closed;
  gate().opened.notify_all();
}

const at::Generator& generator(int device) {
  return at::globalContext().defaultGenerator(c10::Device(kDevice, c10::DeviceIndex(device)));
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("register_device", &register_device);
  m.def("shutdown", &shutdown);
  m.def("device_count", &device_count);
  m.def("current_device", &current_device);
  m.def("exchange_device", &exchange_device);
  m.def("synchronize", &synchronize_device);
  m.def("counters", &counters);
  m.def("occupy", &occupy);
  m.def("release", &release_all);
  m.def("memory_allocated", [](int device) { return memory_use(device).now; });
  m.def("manual_seed", [](int device, uint64_t seed) { at::Generator(generator(device)).set_current_seed(seed); });
  m.def("get_rng_state", [](int device) { return generator(device).get_state(); });
  m.def("set_rng_state", [](int device, const Tensor& state) { at::Generator(generator(device)).set_state(state); });
  pybind11::class_<RefBackend, c10::intrusive_ptr<RefBackend>, c10d::Backend>(m, "RefBackend")
      .def(pybind11::init([](const c10::intrusive_ptr<c10d::Backend>& gloo, int rank, int size, double seconds) {
        return c10::make_intrusive<RefBackend>(gloo, rank, size, Milliseconds(int64_t(seconds * 1000)));
      }))
      .def_property_readonly("options", &RefBackend::getBackendOptions);
}

} // namespace refdev

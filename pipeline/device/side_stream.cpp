#include "pipeline/device/side_stream.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace ditfleet::pipeline {

struct SideStream::Streams {
  explicit Streams(c10::Device where)
      : device(where),
        guard(where.type()),
        own(guard.getStreamFromGlobalPool(where)),
        begin(where.type()),
        end(where.type()) {}
  const c10::Device device;
  const c10::impl::VirtualGuardImpl guard;
  const c10::Stream own;
  c10::Event begin, end;
};

SideStream::SideStream(c10::Device device) : streams_(device.is_cuda() ? std::make_unique<Streams>(device) : nullptr) {}

SideStream::~SideStream() {
  try {
    if (open_) streams_->end.synchronize();
  } catch (...) {  // the device has failed, so nothing runs there
  }
}

void SideStream::start(const std::function<void()>& work) {
  if (!streams_) return work();
  if (std::exchange(open_, false)) streams_->end.synchronize();
  streams_->begin.record(streams_->guard.getStream(streams_->device));
  const c10::StreamGuard current(streams_->own);
  streams_->begin.block(streams_->own);
  work();
  streams_->end.record(streams_->own);
  open_ = true;
}

void SideStream::join() {
  if (std::exchange(open_, false)) streams_->end.block(streams_->guard.getStream(streams_->device));
}

}  // namespace ditfleet::pipeline

#include "shared/core/named_thread.h"

#include <pthread.h>

namespace ditfleet {

NamedThread::NamedThread(const std::string& name) : name_(name.substr(0, 15)), pool_(1) {
  asio::post(pool_, [name = name_] { ::pthread_setname_np(::pthread_self(), name.c_str()); });
}

NamedThread::~NamedThread() { pool_.join(); }

}  // namespace ditfleet

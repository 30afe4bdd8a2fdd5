# Packaged libraries, each as one imported target. tools/setup.sh installs them.
find_package(Threads REQUIRED)
find_package(PkgConfig REQUIRED)

# kv_package(ZMQ libzmq>=4.3): pkg_check_modules as PkgConfig::ZMQ, with the same flags at every configuration.
# CMake takes `-isystem DIR` of a .pc file for an include path first, and for a compiler option once it is cached:
# the second configuration of a tree, by another ./dev command, compiled everything again.
function(kv_package name module)
  pkg_check_modules(${name} REQUIRED IMPORTED_TARGET ${module})
  get_target_property(folders PkgConfig::${name} INTERFACE_INCLUDE_DIRECTORIES)
  get_target_property(options PkgConfig::${name} INTERFACE_COMPILE_OPTIONS)
  if(NOT folders)
    set(folders)
  endif()
  set(others)
  while(options)
    list(POP_FRONT options option)
    if(option STREQUAL "-isystem")
      list(POP_FRONT options folder)
      list(APPEND folders ${folder})
    else()
      list(APPEND others ${option})
    endif()
  endwhile()
  list(SORT folders)
  list(REMOVE_DUPLICATES folders)
  set_target_properties(PkgConfig::${name} PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${folders}"
                        INTERFACE_COMPILE_OPTIONS "${others}")
endfunction()

kv_package(ZMQ libzmq>=4.3)
kv_package(MHD libmicrohttpd>=0.9.75)
kv_package(GNUTLS gnutls>=3.6) # that libmicrohttpd is built with
kv_package(CURL libcurl>=7.68)
kv_package(CARES libcares>=1.18)
kv_package(EXPAT expat>=2.4.0) # which bounds what entities grow to
kv_package(SYSTEMD libsystemd)
kv_package(ZSTD libzstd>=1.4)
kv_package(URING liburing>=2.3)
kv_package(OPENSSL openssl>=3.0)
kv_package(XXHASH libxxhash>=0.8.0)
pkg_check_modules(UCX ucx>=1.11) # not required
if(UCX_FOUND)
  kv_package(UCX ucx>=1.11)
else()
  message(STATUS "no UCX (libucx-dev): libkvbm_ucx isn't built, and agents that require UCX are refused")
endif()
pkg_check_modules(NATS libnats>=3.3) # not required
if(NATS_FOUND)
  kv_package(NATS libnats>=3.3)
else()
  message(STATUS "no NATS client (libnats-dev): libkv_nats isn't built, and nothing speaks NATS")
endif()
pkg_check_modules(NGHTTP2 libnghttp2>=1.43) # not required
pkg_check_modules(PROTOBUFC libprotobuf-c>=1.3) # not required
find_program(KV_PROTOC_C protoc-c)
set(KV_EXTPROC OFF)
if(NGHTTP2_FOUND AND PROTOBUFC_FOUND AND KV_PROTOC_C)
  kv_package(NGHTTP2 libnghttp2>=1.43)
  kv_package(PROTOBUFC libprotobuf-c>=1.3)
  set(KV_EXTPROC ON)
else()
  message(STATUS "no gRPC (libnghttp2-dev, libprotobuf-c-dev, protobuf-c-compiler): nothing speaks Envoy's external processing")
endif()
if(BUILD_TESTING AND NOT KV_FUZZ)
  kv_package(CMOCKA cmocka>=1.1.5)
endif()

# Toolchain for aarch64 on another Debian machine: its cross compiler, the libraries of the folder that
# tools/sysroot.sh fills (KV_SYSROOT), and qemu-user to run tests.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(KV_SYSROOT "$ENV{KV_SYSROOT}" CACHE PATH "folder that tools/sysroot.sh arm64 filled")
if(KV_SYSROOT) # empty in the checks of single features, which get the variables below
  set(ENV{KV_SYSROOT} "${KV_SYSROOT}")
endif()
set(CMAKE_SYSROOT "$ENV{KV_SYSROOT}")
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static -L "$ENV{KV_SYSROOT}")
set(ENV{PKG_CONFIG_SYSROOT_DIR} "$ENV{KV_SYSROOT}")
set(ENV{PKG_CONFIG_LIBDIR} "$ENV{KV_SYSROOT}/usr/lib/aarch64-linux-gnu/pkgconfig:$ENV{KV_SYSROOT}/usr/share/pkgconfig")

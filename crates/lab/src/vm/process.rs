//! Starting QEMU: as which user, in which cgroup, and so that it ends with the lab.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, OnceLock};
use std::thread;

use rustix::thread::disable_transparent_huge_pages;

use super::VmConfig;
use crate::image::Image;
use crate::{LabError, lock};

/// Makes a run directory a user's own, with copies of the image: the cache may lie
/// where only the lab's user may look.
pub(super) fn hand_over(image: &mut Image, dir: &Path, user: u32) -> std::io::Result<()> {
    for (file, name) in [(&mut image.vmlinuz, "vmlinuz"), (&mut image.initramfs, "initramfs")] {
        let copy = dir.join(name);
        if *file != copy {
            fs::copy(&*file, &copy)?;
            *file = copy;
        }
        std::os::unix::fs::chown(&*file, Some(user), Some(user))?;
    }
    std::os::unix::fs::chown(dir, Some(user), Some(user))
}

/// Starts QEMU so that it dies with the lab, in its cgroup from the beginning.
pub(super) fn spawn_qemu(
    config: &VmConfig,
    args: &[String],
    dir: &Path,
) -> Result<Child, LabError> {
    let log = fs::File::create(dir.join("qemu.log")).map_err(LabError::file(dir))?;
    let mut command = match &config.cgroup {
        Some(cgroup) => {
            let mut c = Command::new("sh");
            c.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(cgroup.join("cgroup.procs"));
            c.arg("setpriv");
            c
        }
        None => Command::new("setpriv"),
    };
    command.args(["--pdeathsig", "KILL"]);
    if !config.within.is_empty() {
        command.args(&config.within).args(["setpriv", "--pdeathsig", "KILL"]);
    }
    if let Some(user) = config.user.map(|u| u.to_string()) {
        command.args(["--reuid", &user, "--regid", &user, "--clear-groups"]);
    }
    command.arg("qemu-system-x86_64").args(args);
    command.envs(config.env.iter().map(|(k, v)| (k, v)));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    on_lasting_thread(command, config.small_pages).map_err(|e| LabError::Command {
        command: "qemu-system-x86_64".into(),
        message: e.to_string(),
    })
}

/// The kernel's parent-death signal goes by the *thread* that forked, and tests
/// run in threads that end.
///
/// Whether a process gets huge pages is inherited over fork and exec, so it is
/// switched off here for the moment of the fork.
pub(crate) fn on_lasting_thread(command: Command, small_pages: bool) -> std::io::Result<Child> {
    type Order = (Command, bool, Sender<std::io::Result<Child>>);
    static STARTER: OnceLock<Mutex<Sender<Order>>> = OnceLock::new();
    let starter = STARTER.get_or_init(|| {
        let (sender, orders) = channel::<Order>();
        thread::spawn(move || {
            for (mut command, small_pages, answer) in orders {
                let switched = disable_transparent_huge_pages(small_pages);
                let child = switched.map_err(Into::into).and_then(|()| command.spawn());
                let _ = disable_transparent_huge_pages(false);
                let _ = answer.send(child);
            }
        });
        Mutex::new(sender)
    });
    let (answer, answered) = channel();
    let gone = |_| std::io::Error::other("the thread that starts VMs is gone");
    let sender = lock(starter).clone();
    sender.send((command, small_pages, answer)).map_err(|e| gone(e.to_string()))?;
    answered.recv().map_err(|e| gone(e.to_string()))?
}
